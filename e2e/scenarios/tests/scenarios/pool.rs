//! The reservation pool: memory that is really held, and given to whom it is promised.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, Strength, names};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    Call, GI, MI, ModelServer, NODE, Scenario, TIMEOUT, enforce, infos, policy, scenario,
};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

const BALLAST: &str = "highwater_pool_ballast_bytes";
const BUCKETS: &str = "highwater_device_memory_bytes";
const GRANTED: &str = "highwater_pool_granted_bytes";
const OVERSHOOT: &str = "highwater_pod_overshoot_bytes";
const SIZE: &str = "highwater_pool_size_bytes";
const USED: &str = "highwater_pod_memory_used_bytes";

/// What a context takes on the simulated device.
const CONTEXT: i64 = 518 * MI;

/// A policy whose pool is all of each device but a margin.
fn whole(namespace: &str, limit: &str) -> Value {
    let mut spec = enforce(namespace, limit);
    spec["pool"] =
        json!({"sizePercent": 100, "marginSize": "512Mi", "stepSize": "256Mi", "startHoldSeconds": 0});
    // What is taken beyond a grant is little.
    spec["quota"]["breach"]["tolerance"] = json!("64Mi");
    spec
}

#[test]
fn a13_the_pool_holds_its_size_and_what_it_grants_is_there_and_never_more_than_it_has() -> Result<()> {
    scenario("static", async |s| {
        s.program("static", whole(&s.namespace, "30Gi")).await?;
        for device in ["0", "1"] {
            s.metric(BALLAST, &[("device", device)], |held| held > Some(78 * GI)).await?;
        }
        held_as_the_driver_says(s).await?;
        s.policy_condition("static", "PoolShort", "False", "Covered").await?;

        // Without a guard: granted at once, and all of it is free for it.
        let one = s.start("one", "hold 2s; context; alloc 29Gi; serve").await?;
        let device = s.device_of(&one).await?;
        let of_device = [("device", device.as_str())];
        s.pod_metric(&one, GRANTED, |granted| granted == Some(30 * GI)).await?;
        s.got(&one, "alloc", 29 * GI).await?;
        s.strength(&one, Strength::Reservation).await?;
        s.pod_metric(&one, OVERSHOOT, |bytes| bytes.is_some_and(|bytes| bytes <= 2 * GI)).await?;
        s.metric(BALLAST, &of_device, |held| held.is_some_and(|held| (47 * GI..50 * GI).contains(&held)))
            .await?;
        held_as_the_driver_says(s).await?;
        node_says_that_it_reserves(s).await?;

        // Three of 30 GiB on a device of 80: the third gets what is left, and that is said.
        let two = s.start("two", "hold").await?;
        s.pod_metric(&two, GRANTED, |granted| granted == Some(30 * GI)).await?;
        let three = s.start("three", "hold").await?;
        ensure!(s.device_of(&three).await? == device, "all are on one device");
        s.pod_metric(&three, GRANTED, |granted| granted.is_some_and(|granted| granted > 17 * GI)).await?;
        let samples = s.metrics(NODE).await?;
        let (granted, size) = (samples.sum(GRANTED, &of_device), samples.sum(SIZE, &of_device));
        ensure!(granted <= size, "{granted} granted of a pool of {size}");
        s.metric("highwater_pool_short_bytes", &of_device, |short| short > Some(9 * GI)).await?;
        s.policy_condition("static", "PoolShort", "True", "Short").await?;

        // What a pod returns goes to whom it is owed.
        s.remove("two").await?;
        s.pod_metric(&three, GRANTED, |granted| granted == Some(30 * GI)).await?;
        s.metric("highwater_pool_short_bytes", &of_device, |short| short == Some(0)).await?;
        for pod in [&one, &three] {
            s.untouched(pod).await?;
        }
        s.served_without_failure(&one).await
    })
}

/// The buckets add up, and what the keeper says it holds is what the driver knows to be kept.
async fn held_as_the_driver_says(s: &Scenario) -> Result<()> {
    eventually("ledger, keeper and driver to say the same of the ballast", TIMEOUT, async || {
        let kept = s.kept().await?;
        let samples = s.metrics(NODE).await?;
        for (device, bytes) in kept {
            samples.adds_up(&device)?;
            let keeper = samples.bytes(BALLAST, &[("device", &device)])?;
            let ledger = samples.bytes(BUCKETS, &[("device", &device), ("bucket", "ballast")])?;
            ensure!(
                keeper == Some(bytes) && ledger == Some(bytes),
                "device {device}: {bytes} are kept, the keeper says {keeper:?}, the ledger {ledger:?}"
            );
        }
        Ok(())
    })
    .await
}

async fn node_says_that_it_reserves(s: &Scenario) -> Result<()> {
    let nodes: Api<Node> = Api::all(s.client.clone());
    eventually("the node's label for pods that need a reservation", TIMEOUT, async || {
        let node = nodes.get(NODE).await?;
        let value = node.labels().get(names::RESERVATION_LABEL).cloned();
        ensure!(value.as_deref() == Some("true"), "it is {value:?}");
        Ok(())
    })
    .await
}

#[test]
fn b12_b16_a_thief_gets_the_overshoot_at_most_is_named_and_dealt_with_and_its_neighbour_gets_its_guarantee()
-> Result<()> {
    scenario("thief", async |s| {
        let mut spec = owing(&s.namespace);
        // Long enough to see the neighbour served while the thief still holds what it took.
        spec["quota"]["breach"]["holdMilliseconds"] = json!(6000);
        s.program("thief", spec).await?;
        // Asks for what it is owed only when all that is loose is gone: stopped until then.
        let owed = owed("context; alloc 1Gi; hold 4s; alloc 18Gi; serve");
        s.apply(&owed.deployment()).await?;
        let owed = s.running("owed").await?;
        s.got(&owed, "alloc", GI).await?;
        s.signal(&owed, "STOP").await?;
        s.strength(&owed, Strength::Guard).await?;
        let device = s.device_of(&owed).await?;
        s.metric(BALLAST, &[("device", &device)], |held| held > Some(70 * GI)).await?;

        // At one bite: between many small ones the pool takes back what is loose.
        let script = "ignore-sigterm; hold 4s; context; alloc 6Gi; hold 2s; on-oom continue; \
                      alloc 3584Mi; alloc 3072Mi; alloc 2560Mi; alloc 2304Mi; alloc 2Gi; alloc 1792Mi; \
                      leak 64Mi every 5ms x200; info; hold";
        let thief = s.start("thief", script).await?;
        s.pod_metric(&thief, GRANTED, |granted| granted == Some(8 * GI)).await?;
        s.got(&thief, "alloc", 6 * GI).await?;
        s.strength(&thief, Strength::Reservation).await?;
        let overshoot = s.pod_metric(&thief, OVERSHOOT, |bytes| bytes.is_some()).await?.unwrap_or(0);
        ensure!(overshoot <= 2 * GI, "it could take {overshoot} bytes");

        s.says(&thief, " info {").await?;
        let log = s.log(&thief).await?;
        let held = log.iter().filter_map(|line| Call::of(&line.text)).map(|call| call.held).max();
        let most = 8 * GI + overshoot + 64 * MI - CONTEXT;
        ensure!(held <= Some(most), "it got {held:?}, and could have got {most}");
        ensure!(held > Some(8 * GI - CONTEXT + 64 * MI), "it took nothing: {held:?}");
        s.signal(&owed, "CONT").await?;
        s.got(&owed, "alloc", 18 * GI).await?;

        s.event(&thief.name_any(), "TookUngranted").await?;
        let incident = s.incident(&thief, DecisionState::Succeeded, "MemoryReturned").await?;
        let evidence = incident.spec.evidence;
        ensure!(evidence.strength == Some(Strength::Reservation), "{:?}", evidence.strength);
        ensure!(evidence.overshoot_bytes.is_some(), "the evidence says how much it could have taken");
        s.says(&owed, " serve used=").await?;
        s.untouched(&owed).await?;
        s.refused_nothing(&owed).await?;
        s.served_without_failure(&owed).await
    })
}

/// A policy with a whole pool, of which pods named `owed` are guaranteed 20 GiB.
fn owing(namespace: &str) -> Value {
    let mut spec = whole(namespace, "8Gi");
    spec["quota"]["rules"] = json!([{
        "name": "owed", "pods": {"matchLabels": {"app": "owed"}}, "guarantee": "20Gi", "limit": "20Gi",
    }]);
    spec
}

fn owed(script: &str) -> ModelServer {
    ModelServer::new("owed", script).guarded()
}

#[test]
fn a19_l03_memory_made_without_a_context_is_contained_its_candidate_named_and_nobody_punished() -> Result<()>
{
    scenario("nameless", async |s| {
        s.program("nameless", owing(&s.namespace)).await?;
        s.apply(&owed("context; alloc 1Gi; serve").deployment()).await?;
        let owed = s.running("owed").await?;
        s.says(&owed, " serve used=").await?;
        let quiet = s.start("quiet", "hold 2s; context; alloc 4Gi; serve").await?;
        s.got(&quiet, "alloc", 4 * GI).await?;
        let device = s.device_of(&quiet).await?;
        s.metric(BALLAST, &[("device", &device)], |held| held > Some(65 * GI)).await?;

        // No process list shows it, and it asks for as much as there is.
        let hoarder = s.start("hoarder", "hold 3s; on-oom continue; create 6Gi; create 20Gi; hold").await?;
        s.got(&hoarder, "physical", 6 * GI).await?;
        s.says(&hoarder, " op=physical bytes=21474836480 code=2 ").await?;
        let unexplained = [("device", device.as_str()), ("bucket", "unexplained")];
        s.metric(BUCKETS, &unexplained, |bytes| bytes.is_some_and(|b| (6 * GI..7 * GI).contains(&b))).await?;
        s.pod_metric(&hoarder, USED, |used| used == Some(0)).await?;
        s.event(&hoarder.name_any(), "UnlistedMemory").await?;

        // It is not at the cost of who is owed something, and nothing is done to anybody.
        s.follow(&owed, &[], "context; alloc 17Gi").await?.well()?;
        never("an incident about a pod", Duration::from_secs(3), async || {
            let incidents = s.incidents().await?;
            incidents
                .iter()
                .find(|i| i.spec.subject.is_some())
                .map(kube::ResourceExt::name_any)
                .context("none")
        })
        .await?;
        for pod in [&owed, &quiet] {
            let events = s.events_about(&pod.name_any()).await?;
            ensure!(
                !events.iter().any(|reason| reason == "UnlistedMemory"),
                "{}: {events:?}",
                pod.name_any()
            );
            s.served_without_failure(pod).await?;
        }
        for pod in [&owed, &quiet, &hoarder] {
            s.untouched(pod).await?;
        }
        Ok(())
    })
}

#[test]
fn l10_l11_l12_grants_grow_in_steps_beyond_guarantees_go_back_and_are_waited_for() -> Result<()> {
    scenario("elastic", async |s| {
        // Limits of 120 GiB on a pool of 47.
        let spec = |wait: i32| {
            let mut spec = enforce(&s.namespace, "60Gi");
            spec["quota"]["default"]["guarantee"] = json!("8Gi");
            spec["pool"] = json!({"sizePercent": 60, "startHoldSeconds": 0, "allocationWaitSeconds": wait});
            spec
        };
        s.program("elastic", spec(20)).await?;
        let burst = s.start_guarded("burst", "context; alloc 30Gi; serve").await?;
        let device = s.device_of(&burst).await?;
        let of_device = [("device", device.as_str())];
        s.got(&burst, "alloc", 30 * GI).await?;
        // L12: far above its guarantee, by what it uses and a step or two.
        let least = 30 * GI + CONTEXT;
        let granted = |granted: Option<i64>| granted.is_some_and(|g| (least..least + 3 * GI).contains(&g));
        s.pod_metric(&burst, GRANTED, granted).await?;
        eventually("the rest of the pool to be held", TIMEOUT, async || {
            let samples = s.metrics(NODE).await?;
            let all = samples.sum(BALLAST, &of_device) + samples.sum(GRANTED, &of_device);
            let size = samples.sum(SIZE, &of_device);
            ensure!((size - all).abs() <= 256 * MI, "{all} held and granted of a pool of {size}");
            samples.adds_up(&device)
        })
        .await?;

        // L11, L10: what is not there is waited for, and given when somebody ends.
        let waits = s.start_guarded("waits", "context; alloc 20Gi; hold 1s; info; serve").await?;
        let asked = s.says(&waits, "has a context").await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let got = s.log(&waits).await?.iter().any(|line| line.text.contains(" op=alloc "));
        ensure!(!got, "it was answered although the pool has not that much");
        s.untouched(&burst).await?;
        s.remove("burst").await?;
        let waited = s.got(&waits, "alloc", 20 * GI).await?.after(asked.at);
        ensure!(waited >= Duration::from_secs(2), "it waited only {waited:?}");
        let shown = s.says(&waits, " info {").await?;
        let shown = infos(&shown.text)?;
        let total = shown.first().and_then(|info| info["total"].as_i64());
        ensure!(total == Some(60 * GI), "it sees a card of {total:?}");
        let free = shown.first().and_then(|info| info["free"].as_i64()).context("what is free")?;
        ensure!(free < 30 * GI, "{free} are said to be free of a pool of 47 GiB");

        let other = s.start_guarded("other", "hold").await?;
        let process = s.spawn(&other, &[], "context; alloc 10Gi; hold").await?;
        s.pod_metric(&other, GRANTED, |granted| granted >= Some(10 * GI + CONTEXT)).await?;

        // L10: not for ever; and what the pool can never have is not waited for.
        s.apply(&policy("elastic", spec(4))).await?;
        s.programmed("elastic").await?;
        let output = s.follow(&waits, &[], "context; expect-oom alloc 24Gi").await?.well()?;
        let seconds = seconds_between(&output, "has a context", "code=2")?;
        ensure!((3.5..10.0).contains(&seconds), "it was refused after {seconds} s:\n{output}");
        let output = s.follow(&waits, &[], "context; expect-oom alloc 35Gi").await?.well()?;
        let seconds = seconds_between(&output, "has a context", "code=2")?;
        ensure!(seconds < 2.0, "it was refused after {seconds} s:\n{output}");

        // What a process was granted goes back when it ends.
        s.exec(&other, &["kill", "-KILL", &process]).await?.well()?;
        s.pod_metric(&other, GRANTED, |granted| granted == Some(0)).await?;
        for pod in [&waits, &other] {
            s.untouched(pod).await?;
            s.strength(pod, Strength::Guard).await?;
        }
        Ok(())
    })
}

#[test]
fn a20_engines_that_start_together_beside_one_that_moves_get_all_that_they_measured_as_free() -> Result<()> {
    scenario("profile", async |s| {
        let mut spec = whole(&s.namespace, "30Gi");
        // With the start hold that a policy has where it says nothing.
        spec["pool"] = json!({"sizePercent": 100, "marginSize": "512Mi", "stepSize": "256Mi"});
        spec["quota"]["rules"] = json!([{
            "name": "moves", "pods": {"matchLabels": {"app": "moves"}}, "guarantee": "1Gi", "limit": "14Gi",
        }]);
        s.program("profile", spec).await?;
        for device in ["0", "1"] {
            s.metric(BALLAST, &[("device", device)], |held| held > Some(78 * GI)).await?;
        }
        let moves = "context; alloc 1Gi; on-oom continue; swing 8Gi every 300ms x1000";
        let moves = s.start_guarded("moves", moves).await?;
        s.got(&moves, "alloc", 8 * GI).await?;

        // As an engine starts: what is free, the weights, a run that shows what work takes, the cache in
        // what is left after that, and graphs.
        let script = "context; hold 1s; info; alloc 14Gi; hold 1s; info; spike 6Gi for 1s; hold 1s; info; \
                      alloc 9Gi; capture 2464Mi; hold 1s; info; alloc 4Gi; expect-oom alloc 1Gi; serve";
        for engine in ["one", "two"] {
            s.apply(&ModelServer::new(engine, script).guarded().deployment()).await?;
        }
        let mut measured = Vec::new();
        for engine in ["one", "two"] {
            let pod = s.running(engine).await?;
            s.says(&pod, " serve used=").await?;
            let log = s.log(&pod).await?;
            let told: Vec<_> = log.iter().filter(|line| line.text.contains(" info {")).collect();
            let text: Vec<_> = told.iter().map(|line| line.text.as_str()).collect();
            let free: Vec<_> = infos(&text.join("\n"))?
                .iter()
                .map(|info| {
                    ensure!(info["total"].as_i64() == Some(30 * GI), "not a card of its limit: {info}");
                    info["free"].as_i64().context("nothing is said to be free")
                })
                .collect::<Result<_>>()?;
            // Nothing but its own use moves it: neither the other that starts nor the one that moves.
            let all = 30 * GI - CONTEXT;
            for (free, held) in free.iter().zip([0, 14 * GI, 14 * GI, 23 * GI + 2464 * MI]) {
                ensure!((all - held - free).abs() <= 64 * MI, "{free} free beside {held}: {text:?}");
            }
            let ends = (told.first().map(|line| line.at), told.last().map(|line| line.at));
            ensure!(free.len() == 4, "it said {} times what is free", free.len());
            measured.push((pod, ends));
        }
        let [(one, ends_of_one), (two, ends_of_two)] = measured.as_slice() else {
            anyhow::bail!("two engines started");
        };
        ensure!(
            ends_of_one.0 < ends_of_two.1 && ends_of_two.0 < ends_of_one.1,
            "they did not start together: {ends_of_one:?}, {ends_of_two:?}"
        );
        let device = s.device_of(one).await?;
        for pod in [two, &moves] {
            ensure!(s.device_of(pod).await? == device, "all are on one device");
        }
        s.metrics(NODE).await?.adds_up(&device)?;
        for pod in [one, two] {
            s.strength(pod, Strength::Guard).await?;
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        s.untouched(&moves).await
    })
}

/// How long it took a script from one line of its output to another, by its own clock.
fn seconds_between(output: &str, first: &str, last: &str) -> Result<f64> {
    let at = |text: &str| -> Result<f64> {
        let line = output.lines().find(|line| line.contains(text)).with_context(|| format!("no {text:?}"))?;
        let time = line.split_whitespace().nth(1).and_then(|time| time.strip_suffix('s'));
        time.and_then(|time| time.parse().ok()).with_context(|| format!("no time in {line:?}"))
    };
    Ok(at(last)? - at(first)?)
}
