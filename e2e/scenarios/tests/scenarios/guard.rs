//! The guard: quotas that hold at the call, whoever calls, and whatever dies meanwhile.

use std::{path::Path, pin::pin, time::Duration};

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, Strength, StrengthReason};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    Call, GI, MI, ModelServer, NODE, SYSTEM, Scenario, TIMEOUT, calls, deployment, enforce, infos, policy,
    restarts, scenario,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};

const USED: &str = "highwater_pod_memory_used_bytes";
const CHARGED: &str = "highwater_pod_guard_charged_bytes";
const DIFFERENCE: &str = "highwater_pod_memory_difference_bytes";
const REFUSALS: &str = "highwater_guard_refusals_total";

/// What a context takes on the simulated device.
const CONTEXT: i64 = 518 * MI;

/// Every way to take memory of a device.
const WAYS: [&str; 10] =
    ["alloc", "pitch", "managed", "vmm", "create", "async", "pool", "array", "graph", "capture"];

/// How long a change of policy may take until it holds at the call.
const LIVE: Duration = Duration::from_secs(2);

#[test]
fn s1_s2_s4_a05_a07_a08_b01_b02_b03_b08_h08_a_pod_sees_its_quota_as_the_card_and_no_call_gets_more()
-> Result<()> {
    scenario("card", async |s| {
        s.program("card", enforce(&s.namespace, "16Gi")).await?;
        let neighbour = s.start("neighbour", "context; alloc 4Gi; serve").await?;
        // What the agent says is free follows a sample later, hence the pauses.
        let taken = WAYS.map(|way| format!("{way} 1Gi")).join("; ");
        let refused = WAYS.map(|way| format!("expect-oom {way} 6Gi")).join("; ");
        let script = format!(
            "context; hold 1s; info; {taken}; hold 1s; info; free; synchronize; trim; hold 1s; info; \
             alloc 10Gi; {refused}; host 1Gi; vmm 4Gi; expect-oom vmm 2Gi; free 4Gi; vmm 5Gi; hold 1s; info; serve"
        );
        // What switches other guards off.
        let server = ModelServer::new("guarded", &script)
            .guarded()
            .env("LD_PRELOAD", "")
            .env("CUDA_DISABLE_CONTROL", "true");
        s.apply(&server.deployment()).await?;
        let pod = s.running("guarded").await?;
        // Charged to the device in the allocation's properties, not to the current context's.
        let two = "context; alloc 14Gi; device 1; create 14Gi; expect-oom create 4Gi; \
                   device 0; expect-oom alloc 4Gi; serve";
        s.apply(&ModelServer::new("two", two).guarded().gpus(2).deployment()).await?;

        s.says(&pod, " serve used=").await?;
        let said = said(s, &pod).await?;
        let infos = infos(&said)?;
        let free: Vec<_> = infos.iter().map(|info| shows_a_card_of(info, 16 * GI)).collect::<Result<_>>()?;
        let all = 16 * GI - CONTEXT;
        for ((free, expected), slack) in
            free.iter().zip([all, all - 10 * GI, all, all - 15 * GI]).zip([64, 256, 64, 64])
        {
            ensure!((free - expected).abs() <= slack * MI, "{free} are free, not {expected}: {infos:?}");
        }
        let refusals = calls(&said).into_iter().filter(Call::is_refusal).count();
        ensure!(refusals == WAYS.len() + 1, "{refusals} refusals:\n{said}");
        s.strength(&pod, Strength::Guard).await?;
        let counted = i64::try_from(refusals)?;
        s.refused(&pod, |count| count >= counted).await?;
        three_views_agree(s, &pod).await?;

        // 16 MiB less than a context are left.
        let device = s.device_of(&pod).await?;
        let full = "expect-oom create 1Gi; expect-oom context";
        for lookup in ["proc-address", "dlsym"] {
            s.follow(&pod, &["--lookup", lookup], full).await?.well()?;
        }
        // Without its environment the program sees every device of the node.
        let full = format!("device {device}; {full}");
        let login = format!("/usr/bin/workload --script '{full}'");
        for bare in [
            &["env", "-i", "/usr/bin/workload", "--script", &full][..],
            &["env", "-i", "sh", "-l", "-c", &login],
        ] {
            s.exec(&pod, bare).await?.well().with_context(|| format!("{bare:?}"))?;
        }

        let two = s.running("two").await?;
        s.says(&two, " serve used=").await?;
        s.strength(&two, Strength::Guard).await?;
        for pod in [&pod, &two, &neighbour] {
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        ensure!(s.incidents().await?.is_empty(), "nobody exceeded anything");
        Ok(())
    })
}

#[test]
fn a10_a_pod_with_two_gpus_has_a_quota_an_account_and_refusals_on_each() -> Result<()> {
    scenario("ranks", async |s| {
        s.program("ranks", enforce(&s.namespace, "16Gi")).await?;
        // Two ranks of an engine: one fills its device, and the other has a device of its own.
        let script = "fork 1 { device 1; context; alloc 6Gi; hold 4s; info; hold }; \
                      context; alloc 15Gi; expect-oom create 1Gi; hold 4s; info; hold";
        let ranks = ModelServer::new("ranks", script).guarded().gpus(2);
        let pod = s.start_server("ranks", &ranks).await?;
        s.strength(&pod, Strength::Guard).await?;
        let (full, other) = (15 * GI + CONTEXT, 6 * GI + CONTEXT);
        let name = pod.name_any();
        eventually("each device to have its own numbers", TIMEOUT, async || {
            let samples = s.metrics(NODE).await?;
            let mut seen = Vec::new();
            for device in samples.devices_of(&name) {
                let (pod, device) = (name.as_str(), device.as_str());
                let of_device = [("namespace", s.namespace.as_str()), ("pod", pod), ("device", device)];
                let (used, charged) = (samples.bytes(USED, &of_device)?, samples.bytes(CHARGED, &of_device)?);
                seen.push((used, charged, samples.sum(REFUSALS, &of_device) > 0));
            }
            seen.sort_unstable();
            let expected = [(Some(other), Some(other), false), (Some(full), Some(full), true)];
            ensure!(seen == expected, "used, charged, refused: {seen:?}");
            Ok(())
        })
        .await?;
        let infos = eventually("both ranks to say what they see", TIMEOUT, async || {
            let infos = infos(&said(s, &pod).await?)?;
            ensure!(infos.len() == 2, "there are {infos:?}");
            Ok(infos)
        })
        .await?;
        let mut free: Vec<_> =
            infos.iter().map(|info| shows_a_card_of(info, 16 * GI)).collect::<Result<_>>()?;
        free.sort_unstable();
        for (free, held) in free.iter().zip([full, other]) {
            ensure!((16 * GI - held - free).abs() <= 64 * MI, "{free} are free beside {held}: {infos:?}");
        }
        // What the full one refuses, the other gives, up to its own quota.
        let both = "expect-oom create 1Gi; device 1; create 8Gi; expect-oom create 2Gi; \
                    device 0; expect-oom create 1Gi";
        s.follow(&pod, &[], both).await?.well()?;
        s.untouched(&pod).await?;
        ensure!(s.incidents().await?.is_empty(), "nobody exceeded anything");
        Ok(())
    })
}

/// All that a pod's script has printed.
async fn said(s: &Scenario, pod: &Pod) -> Result<String> {
    let log = s.log(pod).await?;
    Ok(log.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n"))
}

/// Fails where driver and NVML do not show the same device of this size; what is free of it.
fn shows_a_card_of(info: &Value, size: i64) -> Result<i64> {
    let totals = [&info["total"], &info["deviceTotal"], &info["nvml"]["total"], &info["nvmlV2"]["total"]];
    ensure!(totals.iter().all(|total| total.as_i64() == Some(size)), "not a card of {size} bytes: {info}");
    let free = info["free"].as_i64().context("nothing is said to be free")?;
    let others = [&info["nvml"]["free"], &info["nvmlV2"]["free"]];
    ensure!(others.iter().all(|other| other.as_i64() == Some(free)), "not the same is free for all: {info}");
    Ok(free)
}

/// B08: what guard, driver and ledger say of a pod, with the difference by its parts.
async fn three_views_agree(s: &Scenario, pod: &Pod) -> Result<()> {
    let name = pod.name_any();
    let device = s.device_of(pod).await?;
    let number: u64 = device.parse().context("the device is a whole one")?;
    eventually("the three views to agree", TIMEOUT, async || {
        let of_pod = [("namespace", s.namespace.as_str()), ("pod", name.as_str())];
        let samples = s.metrics(NODE).await?;
        let used = samples.bytes(USED, &of_pod)?.context("no use")?;
        let charged = samples.bytes(CHARGED, &of_pod)?.context("nothing charged")?;
        let parts = samples.sum(DIFFERENCE, &of_pod);
        ensure!(used == charged + parts, "{used} used, {charged} charged, {parts} between them");
        ensure!(parts.abs() <= 64 * MI, "{charged} charged, and {parts} of difference");
        let pods = [("device", device.as_str()), ("bucket", "pods")];
        let pods = samples.bytes("highwater_device_memory_bytes", &pods)?;
        let driver = s.driver().await?;
        let holders = driver["holders"].as_array().into_iter().flatten();
        let here = holders.filter(|holder| holder["region"]["device"].as_u64() == Some(number));
        let listed: i64 = here.filter_map(|holder| holder["charged"].as_i64()).sum();
        ensure!(pods == Some(listed), "the ledger has {pods:?} of pods, the driver {listed}");
        Ok(())
    })
    .await
}

#[test]
fn a03_a04_b14_h09_h10_processes_share_one_quota_exactly_and_the_dead_and_the_stopped_hold_nobody_up()
-> Result<()> {
    scenario("shared", async |s| {
        // Two contexts and one and a half of what two ask for; or eight, and three and a half.
        s.program("shared", enforce(&s.namespace, "7644Mi")).await?;
        let pod = s.start_guarded("shared", "hold").await?;
        for (round, (processes, megabytes, refused)) in
            [(2, 4404, 1), (2, 4404, 1), (2, 4404, 1), (8, 1000, 5)].into_iter().enumerate()
        {
            let each = format!("context; hold 2s; on-oom continue; alloc {megabytes}Mi; hold 2s");
            let output = s.follow(&pod, &[], &format!("fork {processes} {{ {each} }}")).await?.well()?;
            let calls = calls(&output);
            let counted = calls.iter().filter(|call| call.is_refusal()).count();
            ensure!(
                calls.len() == processes && counted == refused,
                "round {round}: {counted} of {processes} refused, not {refused}:\n{output}"
            );
            nothing_is_charged(s, &pod).await.with_context(|| format!("round {round}"))?;
        }

        let busy = "context; on-oom continue; leak 2Mi every 1ms";
        for milliseconds in [50, 170, 310] {
            let processes = [s.spawn(&pod, &[], busy).await?, s.spawn(&pod, &[], busy).await?];
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
            s.exec(&pod, &["kill", "-KILL", &processes[0], &processes[1]]).await?.well()?;
            let right = nothing_is_charged(s, &pod).await;
            right.with_context(|| format!("killed after {milliseconds} ms"))?;
        }

        let stopped = s.spawn(&pod, &[], busy).await?;
        s.exec(&pod, &["kill", "-STOP", &stopped]).await?.well()?;
        let start = tokio::time::Instant::now();
        s.follow(&pod, &[], "context; alloc 256Mi; free; alloc 256Mi").await?.well()?;
        ensure!(start.elapsed() < Duration::from_secs(5), "a stopped process held another up");
        s.exec(&pod, &["kill", "-KILL", &stopped]).await?.well()?;
        nothing_is_charged(s, &pod).await?;
        // Nothing was lost on the way.
        s.follow(&pod, &[], "context; alloc 7100Mi; expect-oom alloc 64Mi").await?.well()?;
        s.strength(&pod, Strength::Guard).await?;
        s.untouched(&pod).await
    })
}

/// Within a second of the end of its processes, a pod holds and is charged for nothing.
async fn nothing_is_charged(s: &Scenario, pod: &Pod) -> Result<()> {
    let name = pod.name_any();
    let of_pod = [("namespace", s.namespace.as_str()), ("pod", name.as_str())];
    eventually("nothing to be charged", Duration::from_secs(1), async || {
        let samples = s.metrics(NODE).await?;
        let left = (samples.bytes(CHARGED, &of_pod)?, samples.bytes(USED, &of_pod)?);
        ensure!(left == (Some(0), Some(0)), "charged and used: {left:?}");
        Ok(())
    })
    .await
}

#[test]
fn l09_a_quota_that_is_edited_holds_at_the_call_within_two_seconds_and_shrinks_softly() -> Result<()> {
    scenario("live", async |s| {
        // No restart above the limit, for now.
        let quota = |limit: &str| {
            let mut spec = enforce(&s.namespace, limit);
            spec["quota"]["breach"]["actions"] = json!([{"type": "Signal"}]);
            spec
        };
        s.program("live", quota("16Gi")).await?;
        let script = "context; alloc 10Gi; on-oom retry; alloc 9Gi; on-oom continue; serve";
        let pod = s.start_guarded("live", script).await?;
        s.says(&pod, " op=alloc bytes=9663676416 code=2 ").await?;

        let edited = Timestamp::now();
        s.apply(&policy("live", quota("32Gi"))).await?;
        let raised = s.got(&pod, "alloc", 9 * GI).await?.after(edited);
        ensure!(raised <= LIVE, "the higher limit held only after {raised:?}");
        let shown = infos(&s.follow(&pod, &[], "info").await?.well()?)?;
        shows_a_card_of(&shown[0], 32 * GI)?;

        // Below what it holds: nothing is taken away, and no more is given.
        let edited = Timestamp::now();
        s.apply(&policy("live", quota("16Gi"))).await?;
        let refused = s.says(&pod, " last=CUDA_ERROR_OUT_OF_MEMORY").await?.after(edited);
        let beat = Duration::from_secs(1);
        ensure!(refused <= LIVE + beat, "the lower limit held only after {refused:?}");
        s.follow(&pod, &[], "expect-oom create 2Mi").await?.well()?;
        s.pod_metric(&pod, USED, |used| used > Some(19 * GI)).await?;
        s.untouched(&pod).await?;

        // Who does not shrink is the breaker's.
        s.apply(&policy("live", enforce(&s.namespace, "16Gi"))).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn b09_while_the_agent_dies_and_is_replaced_the_quota_holds_and_what_is_within_it_goes_on() -> Result<()> {
    scenario("agent-away", async |s| {
        s.program("agent-away", enforce(&s.namespace, "16Gi")).await?;
        // Reaches its quota after 11 s, and then asks for more all the time.
        let script = "context; alloc 8Gi; on-oom continue; leak 64Mi every 100ms";
        let pod = s.start_guarded("grows", script).await?;
        s.got(&pod, "alloc", 8 * GI).await?;
        s.strength(&pod, Strength::Guard).await?;

        let agent = s.agent(NODE).await?;
        let killed = Timestamp::now();
        s.kill("agent").await?;
        let agent = s.back("agent", &agent).await?;
        let back = Timestamp::now();
        let got_meanwhile = s.log(&pod).await?.into_iter().any(|line| {
            line.at > killed && line.at < back && Call::of(&line.text).is_some_and(|call| call.code == 0)
        });
        ensure!(got_meanwhile, "nothing was to be had from {killed} to {back}, while the agent was dead");

        s.says(&pod, " code=2 ").await?;
        let replaced = Timestamp::now();
        s.roll_out("agent").await?;
        s.back("agent", &agent).await?;
        let refused = "a refusal without an agent";
        let refusal = |call: Call| call.is_refusal();
        s.says_where(&pod, refused, |line| line.at > replaced && Call::of(&line.text).is_some_and(refusal))
            .await?;
        s.strength(&pod, Strength::Guard).await?;
        // A process that was born after all this.
        s.follow(&pod, &[], "expect-oom create 1Gi").await?.well()?;
        s.pod_metric(&pod, CHARGED, |charged| charged.is_some_and(|charged| charged > 15 * GI)).await?;
        let most =
            s.log(&pod).await?.iter().filter_map(|line| Call::of(&line.text)).map(|call| call.held).max();
        ensure!(most <= Some(16 * GI - CONTEXT), "it got {most:?} under a quota of 16 GiB");
        s.untouched(&pod).await
    })
}

#[test]
fn b09_while_kubelet_and_agent_are_away_and_come_back_limits_and_accounts_of_running_pods_hold() -> Result<()>
{
    scenario("kubelet-away", async |s| {
        s.program("kubelet-away", enforce(&s.namespace, "16Gi")).await?;
        // Reaches its quota after 18 s, and then asks for more all the time.
        let grows = "context; alloc 8Gi; on-oom continue; leak 64Mi every 150ms";
        let grows = s.start_guarded("grows", grows).await?;
        let steady = s.start_guarded("steady", "context; alloc 4Gi; hold").await?;
        s.got(&grows, "alloc", 8 * GI).await?;
        s.got(&steady, "alloc", 4 * GI).await?;
        for pod in [&grows, &steady] {
            s.strength(pod, Strength::Guard).await?;
        }
        let agent = s.agent(NODE).await?;
        let away = Timestamp::now();
        let kubelet = format!("kubelet-{NODE}");
        s.cluster.kill(&kubelet).await?;
        let without = without_kubelet(s, &grows, &steady).await;
        s.cluster.start(&kubelet).await?;
        without?;
        s.back("agent", &agent).await?;
        let back = Timestamp::now();

        // What went on meanwhile: memory within the quota was to be had, and none beyond it.
        let calls: Vec<_> = s
            .log(&grows)
            .await?
            .into_iter()
            .filter(|line| line.at > away && line.at < back)
            .filter_map(|line| Call::of(&line.text))
            .collect();
        let (refused, got): (Vec<_>, Vec<_>) = calls.iter().partition(|call| call.is_refusal());
        ensure!(
            got.len() > 30 && !refused.is_empty(),
            "{} calls of {} were refused from {away} to {back}",
            refused.len(),
            calls.len()
        );
        let most = calls.iter().map(|call| call.held).max();
        ensure!(most <= Some(16 * GI - CONTEXT), "it got {most:?} under a quota of 16 GiB");

        // The next agent has the account of what was charged before it.
        for (pod, least) in [(&grows, 16 * GI - 64 * MI), (&steady, 4 * GI + CONTEXT)] {
            s.strength(pod, Strength::Guard).await?;
            s.pod_metric(pod, CHARGED, |charged| charged.is_some_and(|c| (least..=16 * GI).contains(&c)))
                .await?;
            three_views_agree(s, pod).await?;
        }
        // Processes and pods that are born after all this.
        s.follow(&grows, &[], "expect-oom create 1Gi").await?.well()?;
        s.follow(&steady, &[], "context; alloc 10Gi; expect-oom create 1Gi").await?.well()?;
        let new = s.start_guarded("new", "context; hold 1s; info; expect-oom alloc 16Gi; hold").await?;
        s.says(&new, " op=alloc bytes=17179869184 code=2 ").await?;
        shows_a_card_of(&infos(&said(s, &new).await?)?[0], 16 * GI)?;
        s.strength(&new, Strength::Guard).await?;
        accounts_outlast_the_kubelet(s, &kubelet, &steady).await?;
        ensure!(s.incidents().await?.is_empty(), "nobody exceeded anything");
        for pod in [&grows, &steady, &new] {
            s.untouched(pod).await?;
        }
        Ok(())
    })
}

/// What the driver says while nobody can ask the kubelet, and then nobody the agent either: nothing
/// starts its container again.
async fn without_kubelet(s: &Scenario, grows: &Pod, steady: &Pod) -> Result<()> {
    // The agent knows its pods still.
    let before = s.pod_metric(grows, CHARGED, |charged| charged.is_some()).await?;
    s.pod_metric(grows, CHARGED, |charged| charged > before).await?;
    s.pod_metric(steady, CHARGED, holds_4_gi).await?;
    s.strength(grows, Strength::Guard).await?;
    s.kill("agent").await?;
    eventually("a pod without kubelet and agent to reach its quota", 2 * TIMEOUT, async || {
        let most = held_by_one(s).await?;
        ensure!(most >= 16 * GI - 64 * MI, "the most that a process holds are {most}");
        Ok(())
    })
    .await?;
    never("more than the quota", Duration::from_secs(3), async || {
        let most = held_by_one(s).await?;
        ensure!(most > 16 * GI);
        anyhow::Ok(most)
    })
    .await?;
    let agent = s.agent(NODE).await?;
    let answers = s.page(&agent, 9440, "/metrics").await.is_ok();
    ensure!(!answers, "the agent was there all the time");
    Ok(())
}

/// Whether it is what a pod has that holds 4 GiB, and for moments a little more to serve.
fn holds_4_gi(bytes: Option<i64>) -> bool {
    bytes.is_some_and(|bytes| (0..=2 * MI).contains(&(bytes - 4 * GI - CONTEXT)))
}

/// The most that the driver has given to one process.
async fn held_by_one(s: &Scenario) -> Result<i64> {
    let driver = s.driver().await?;
    let holders = driver["holders"].as_array().into_iter().flatten();
    holders.filter_map(|holder| holder["charged"].as_i64()).max().context("nobody holds anything")
}

/// While the kubelet alone is started anew, what the agent says of a pod has no gap.
async fn accounts_outlast_the_kubelet(s: &Scenario, kubelet: &str, pod: &Pod) -> Result<()> {
    let name = pod.name_any();
    let of_pod = [("namespace", s.namespace.as_str()), ("pod", name.as_str())];
    let restarted = async {
        s.cluster.stop(kubelet).await?;
        s.cluster.start(kubelet).await?;
        // It answers for its pods again.
        eventually("the kubelet to let somebody into a pod", TIMEOUT, async || {
            s.follow(pod, &[], "hold 100ms").await?.well()
        })
        .await
    };
    let mut restarted = pin!(restarted);
    let mut looks = 0;
    loop {
        tokio::select! {
            done = &mut restarted => break done.map(drop)?,
            samples = s.metrics(NODE) => {
                let samples = samples?;
                let seen = [samples.bytes(CHARGED, &of_pod)?, samples.bytes(USED, &of_pod)?];
                ensure!(seen.into_iter().all(holds_4_gi), "charged and used: {seen:?}");
                looks += 1;
            }
        }
    }
    ensure!(looks > 10, "only {looks} looks");
    Ok(())
}

#[test]
fn b05_b12_a_program_that_avoids_the_guard_is_found_told_and_dealt_with_as_unguarded() -> Result<()> {
    scenario("avoided", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["quota"]["rules"] = json!([{
            "name": "strict", "pods": {"matchLabels": {"app": "sly"}}, "limit": "16Gi", "minimumStrength": "Guard",
        }]);
        s.program("avoided", spec).await?;
        let bare = ModelServer::new("sly", "hold");
        eventually("a pod without the guard to be refused", TIMEOUT, async || {
            let answer = s.dry_run(&bare.bare_pod()).await;
            let said = answer.err().map(|error| format!("{error:#}")).unwrap_or_default();
            ensure!(
                said.contains("minimumStrength Guard") && said.contains("highwater.dev/guard"),
                "{said:?}"
            );
            Ok(())
        })
        .await?;
        s.dry_run(&bare.guarded().bare_pod()).await?;

        let pod = s.start_guarded("sly", "context; alloc 1Gi; serve").await?;
        s.says(&pod, " serve used=").await?;
        s.strength(&pod, Strength::Guard).await?;
        s.policy_condition("avoided", "Enforced", "True", "AllAtStrength").await?;

        let thief = s.spawn(&pod, &["--bypass", "namespace"], "context; alloc 2Gi; hold").await?;
        eventually("the driver to show the thief", TIMEOUT, async || {
            let driver = s.driver().await?;
            let holders = driver["holders"].as_array().into_iter().flatten();
            let held: Vec<_> = holders.filter_map(|holder| holder["charged"].as_i64()).collect();
            ensure!(held.contains(&(2 * GI + CONTEXT)), "the holders have {held:?}");
            Ok(())
        })
        .await?;
        s.strength_within(&pod, Strength::Observe, Duration::from_secs(1)).await.context("found too late")?;
        s.event(&pod.name_any(), "StrengthFell").await?;
        s.below_strength(&pod, "OutsideGuard").await?;
        let name = pod.name_any();
        let outside = [("pod", name.as_str()), ("part", "outside_guard")];
        s.metric(DIFFERENCE, &outside, |bytes| bytes.is_some_and(|bytes| bytes >= 2 * GI)).await?;
        // What it took is charged to its pod: 1.5 GiB, 2.5 outside, 0.5 for this context, and 12.
        s.follow(&pod, &[], "context; alloc 10Gi; free; expect-oom alloc 12Gi").await?.well()?;
        let told = s.policy_condition("avoided", "Enforced", "False", "BelowStrength").await?;
        ensure!(told.contains(&name) && told.contains("OutsideGuard"), "{told}");

        s.exec(&pod, &["kill", "-KILL", &thief]).await?.well()?;
        s.strength(&pod, Strength::Guard).await?;
        s.policy_condition("avoided", "Enforced", "True", "AllAtStrength").await?;
        s.untouched(&pod).await?;

        s.spawn(&pod, &["--bypass", "namespace"], "context; alloc 16Gi; hold").await?;
        let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        let evidence = incident.spec.evidence;
        ensure!(
            evidence.strength == Some(Strength::Observe)
                && evidence.strength_reason == Some(StrengthReason::OutsideGuard),
            "{:?}/{:?}",
            evidence.strength,
            evidence.strength_reason
        );
        Ok(())
    })
}

#[test]
fn b17_a_restricted_namespace_has_the_guard_and_a_limit_below_a_context_is_told() -> Result<()> {
    scenario("restricted", async |s| {
        s.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": s.namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }))
        .await?;
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["quota"]["rules"] =
            json!([{"name": "tiny", "pods": {"matchLabels": {"app": "tiny"}}, "limit": "512Mi"}]);
        s.program("restricted", spec).await?;

        let unrestricted = s.dry_run(&ModelServer::new("loose", "hold").guarded().bare_pod()).await;
        ensure!(unrestricted.is_err(), "the namespace is not restricted");
        let server = |name: &str, script: &str| ModelServer::new(name, script).guarded().restricted();
        let script = "context; info; expect-oom alloc 16Gi; expect-oom vmm 16Gi; serve";
        s.apply(&server("guarded", script).deployment()).await?;
        s.apply(&server("tiny", "expect-oom context; hold").deployment()).await?;
        let pod = s.running("guarded").await?;
        s.says(&pod, " serve used=").await?;
        shows_a_card_of(&infos(&said(s, &pod).await?)?[0], 16 * GI)?;
        s.strength(&pod, Strength::Guard).await?;

        let tiny = s.running("tiny").await?;
        s.says(&tiny, " op=context bytes=0 code=2 ").await?;
        s.event(&tiny.name_any(), "QuotaBelowContext").await?;
        s.policy_condition("restricted", "Enforced", "False", "QuotaBelowContext").await?;
        s.untouched(&tiny).await?;

        // A volume that the pod could write would be a way to the socket's folder.
        let mut sly = ModelServer::new("sly", "hold").restricted().bare_pod();
        let volume =
            json!({"name": "highwater-guard", "csi": {"driver": "guard.highwater.dev", "readOnly": false}});
        sly["spec"]["volumes"].as_array_mut().context("volumes")?.push(volume);
        let answer = s.dry_run(&sly).await;
        let said = answer.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(said.contains("needs readOnly: true"), "{said:?}");
        Ok(())
    })
}

#[test]
fn whoever_abuses_the_socket_and_the_pages_of_a_pod_harms_nobody_else() -> Result<()> {
    scenario("intruder", async |s| {
        s.program("intruder", enforce(&s.namespace, "16Gi")).await?;
        let attacker = s.start_guarded("attacker", "hold").await?;
        let honest = s.start_guarded("honest", "context; alloc 4Gi; serve").await?;
        s.says(&honest, " serve used=").await?;
        let intruder = Path::new(env!("CARGO_BIN_EXE_intruder"));
        s.bring(&attacker, intruder, "/tmp/intruder").await?;
        let before = s.agent(NODE).await?;

        let attack = s.exec(&attacker, &["/tmp/intruder", "inside", "/opt/highwater/run/agent.sock"]);
        let meanwhile = async {
            for _ in 0..8 {
                let script = "context; alloc 8Gi; expect-oom alloc 8Gi";
                s.follow(&honest, &[], script).await?.well().context("beside the attack")?;
            }
            anyhow::Ok(())
        };
        let (attack, meanwhile) = tokio::join!(attack, meanwhile);
        attack?.well()?;
        meanwhile?;

        // The same from outside of the pod. The path is too long for an address.
        let uid = attacker.uid().context("no UID")?;
        let folder =
            format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/highwater-guard/mount/run");
        let stranger = format!("cd {folder} && exec {} outside agent.sock", intruder.display());
        s.cluster.on_node(NODE, "sh", &["-c", &stranger]).await?;
        s.event(&attacker.name_any(), "ForeignGuardClient").await?;

        let agent = s.agent(NODE).await?;
        ensure!(
            agent.uid() == before.uid() && restarts(&agent) == restarts(&before),
            "the agent did not outlive it"
        );
        s.strength(&honest, Strength::Guard).await?;
        three_views_agree(s, &honest).await?;
        s.untouched(&honest).await?;
        s.served_without_failure(&honest).await?;
        s.untouched(&attacker).await
    })
}

#[test]
fn b13_without_the_volume_server_strength_falls_with_a_reason_and_new_opted_in_pods_wait() -> Result<()> {
    scenario("no-keeper", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        // What is left free is what `plain` could take, as is what `other` is owed and does not use.
        spec["pool"] = json!({"sizePercent": 75, "stepSize": "256Mi", "startHoldSeconds": 0,
                              "overshootLimit": "30Gi"});
        spec["quota"]["rules"] =
            json!([{"name": "small", "pods": {"matchLabels": {"app": "other"}}, "limit": "2Gi"}]);
        s.program("no-keeper", spec).await?;
        let guarded = s.start_guarded("guarded", "context; alloc 1Gi; serve").await?;
        let plain = s.start("plain", "hold 3s; context; alloc 1Gi; serve").await?;
        s.says(&guarded, " serve used=").await?;
        s.says(&plain, " serve used=").await?;
        s.strength(&guarded, Strength::Guard).await?;
        s.strength(&plain, Strength::Reservation).await?;
        uninstall_is_refused(s, &guarded).await?;

        let without = async {
            place_keeper(s, false).await?;
            s.metric("highwater_keeper_up", &[], |up| up == Some(0)).await?;
            s.strength(&plain, Strength::Observe).await?;
            s.apply(&ModelServer::new("late", "context; info; serve").guarded().deployment()).await?;
            let pods: Api<Pod> = s.api();
            never("a pod that runs without the guard it asked for", Duration::from_secs(5), async || {
                let late = pods.list(&ListParams::default().labels("app=late")).await?;
                let runs = |pod: &Pod| {
                    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
                };
                late.items.iter().find(|pod| runs(pod)).map(kube::ResourceExt::name_any).context("none")
            })
            .await?;
            // Who has the guard keeps it, and who did not ask for it is not kept waiting.
            s.strength(&guarded, Strength::Guard).await?;
            s.follow(&guarded, &[], "expect-oom create 16Gi").await?.well()?;
            s.start("other", "context; alloc 1Gi; serve").await.map(drop)
        }
        .await;
        place_keeper(s, true).await?;
        without?;
        let late = s.running("late").await?;
        s.says(&late, " serve used=").await?;
        shows_a_card_of(&infos(&said(s, &late).await?)?[0], 16 * GI)?;
        s.strength(&late, Strength::Guard).await?;
        s.strength(&plain, Strength::Reservation).await?;
        for pod in [&guarded, &plain] {
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        Ok(())
    })
}

/// Lets keepers run where agents do, or nowhere.
async fn place_keeper(s: &Scenario, anywhere: bool) -> Result<()> {
    let value = if anywhere { Value::Null } else { json!("true") };
    let selector = json!({"highwater.dev/nowhere": value});
    let patch = json!({"spec": {"template": {"spec": {"nodeSelector": selector}}}}).to_string();
    let keeper = "daemonset/highwater-keeper";
    s.cluster.kubectl(["patch", "-n", SYSTEM, keeper, "--type=merge", "-p", &patch]).await?;
    if anywhere {
        s.cluster.kubectl(["rollout", "status", "-n", SYSTEM, keeper, "--timeout=120s"]).await?;
        return Ok(());
    }
    eventually("the keepers to be gone", TIMEOUT, async || {
        let pods: Api<Pod> = Api::namespaced(s.client.clone(), SYSTEM);
        let keepers = ListParams::default().labels("app.kubernetes.io/component=keeper");
        let left = pods.list_metadata(&keepers).await?.items.len();
        ensure!(left == 0, "{left} are there");
        Ok(())
    })
    .await
}

/// What an uninstall asks first: whether pods have the guard's volume.
async fn uninstall_is_refused(s: &Scenario, guarded: &Pod) -> Result<()> {
    let operator = s.operators().await?.pop().context("no operator")?.name_any();
    let cleanup = ["exec", "-n", SYSTEM, &operator, "--", "operator", "cleanup", "--namespace", SYSTEM];
    let answer = s.cluster.kubectl(cleanup).await;
    let said = answer.err().map(|error| format!("{error:#}")).unwrap_or_default();
    let pod = format!("{}/{}", s.namespace, guarded.name_any());
    ensure!(
        said.contains("not uninstalled") && said.contains(&pod),
        "it was not refused for {pod}: {said:?}"
    );
    Ok(())
}

#[test]
fn kernel_limits_hold_where_the_driver_has_them_and_are_reported_unavailable_elsewhere() -> Result<()> {
    scenario("kernel", async |s| {
        let cgroup2 =
            s.cluster.on_node(NODE, "test", &["-e", "/sys/fs/cgroup/cgroup.controllers"]).await.is_ok();
        // Without cgroup v2 that is the reason, whatever the driver.
        if cgroup2 && s.cluster.spec.gpu_driver.is_none() {
            limits_are_reported_unavailable(s, "NoKernelLimits").await?;
        }
        let newer = async {
            use_driver(s, Some("615.10")).await?;
            if cgroup2 {
                limits_hold(s).await
            } else {
                limits_are_reported_unavailable(s, "NoCgroupV2").await
            }
        }
        .await;
        use_driver(s, s.cluster.spec.gpu_driver.as_deref()).await?;
        newer
    })
}

/// The policy under which pods are to have the driver's own limit.
fn kernel(namespace: &str) -> Value {
    let mut spec = enforce(namespace, "16Gi");
    spec["quota"]["rules"] =
        json!([{"name": "kernel", "pods": {}, "limit": "16Gi", "minimumStrength": "Kernel"}]);
    spec
}

/// A pod that was there before the policy is reported; a new one is refused.
async fn limits_are_reported_unavailable(s: &Scenario, reason: &str) -> Result<()> {
    let pod = s.start_guarded("guarded", "context; alloc 1Gi; serve").await?;
    s.program("kernel", kernel(&s.namespace)).await?;
    s.strength(&pod, Strength::Guard).await?;
    s.below_strength(&pod, reason).await?;
    eventually("the policy to say why", TIMEOUT, async || {
        let told = s.policy_condition("kernel", "Enforced", "False", "BelowStrength").await?;
        ensure!(told.contains(reason), "{told}");
        Ok(())
    })
    .await?;
    let answer = s.dry_run(&ModelServer::new("new", "hold").bare_pod()).await;
    let said = answer.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("highwater.dev/kernel-limits"), "{said:?}");
    s.untouched(&pod).await?;
    s.delete_policy("kernel").await?;
    end(s, &pod).await
}

async fn limits_hold(s: &Scenario) -> Result<()> {
    let mut spec = kernel(&s.namespace);
    spec["quota"]["rules"][0]["minimumStrength"] = json!("Observe");
    s.program("kernel", spec).await?;
    // No guard: it is the driver that refuses.
    let script = "hold 3s; context; alloc 8Gi; expect-oom alloc 8Gi; expect-oom vmm 8Gi; serve";
    s.apply(&deployment("plain", script)).await?;
    let pod = s.running("plain").await?;
    s.strength(&pod, Strength::Kernel).await?;
    s.event(&pod.name_any(), "KernelLimit").await?;
    s.says(&pod, " serve used=").await?;
    let limits = s.driver().await?["limits"].clone();
    let hard: Vec<_> = limits.as_array().into_iter().flatten().filter_map(|l| l["hard"].as_i64()).collect();
    ensure!(hard.contains(&(16 * GI)), "the driver has the limits {limits}");
    s.untouched(&pod).await?;
    s.delete_policy("kernel").await?;
    end(s, &pod).await
}

/// Ends the pod of a deployment, and waits until nothing holds memory any more.
async fn end(s: &Scenario, pod: &Pod) -> Result<()> {
    s.cluster.kubectl(["delete", "deployment", "-n", &s.namespace, "--all", "--wait"]).await?;
    let pods: Api<Pod> = s.api();
    eventually("the pod's memory to be back", TIMEOUT, async || {
        ensure!(pods.get_opt(&pod.name_any()).await?.is_none(), "the pod is there");
        let holders = s.driver().await?["holders"].clone();
        ensure!(holders.as_array().is_some_and(Vec::is_empty), "held: {holders}");
        Ok(())
    })
    .await
}

/// Gives the node another version of the driver (or the one that it usually has), which an agent
/// finds when it starts.
async fn use_driver(s: &Scenario, version: Option<&str>) -> Result<()> {
    let spec = &s.cluster.spec;
    let mut host = json!({"seed": NODE, "devices": [{"count": spec.gpus, "memory": spec.gpu_memory}]});
    for (field, value) in [("driverVersion", version), ("memoryLimits", spec.gpu_memory_limits.as_deref())] {
        if let Some(value) = value {
            host[field] = json!(value);
        }
    }
    let file = format!("/tmp/highwater-{}.json", s.namespace);
    s.cluster.on_node(NODE, "sh", &["-c", "printf %s \"$1\" >\"$0\"", &file, &host.to_string()]).await?;
    let changed = s.cluster.gpusim(NODE, &["reconfigure", "--force", &file]).await;
    s.cluster.on_node(NODE, "rm", &[&file]).await?;
    changed?;
    let agent = s.agent(NODE).await?;
    s.kill("agent").await?;
    s.back("agent", &agent).await.map(drop)
}
