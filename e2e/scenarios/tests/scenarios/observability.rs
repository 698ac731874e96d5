//! Metrics, Prometheus and the dashboard.

use std::{collections::BTreeMap, io::Write as _, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use highwater_e2e::eventually;
use highwater_scenarios::{GI, ModelServer, NODE, Scenario, TIMEOUT, deployment, enforce, policy, scenario};
use kube::ResourceExt as _;
use serde_json::{Value, json};

const USED: &str = "highwater_pod_memory_used_bytes";

#[test]
fn m01_m02_m03_two_pods_on_one_gpu_have_a_series_each_and_their_sum_is_the_devices() -> Result<()> {
    scenario("m01-series", async |s| {
        s.apply(&deployment("small", "context; alloc 2Gi; serve")).await?;
        s.apply(&deployment("large", "context; alloc 10Gi; serve")).await?;
        let (small, large) = (s.running("small").await?.name_any(), s.running("large").await?.name_any());
        let small_bytes = s.metric(USED, &[("pod", &small)], |used| used > Some(2 * GI)).await?;
        let large_bytes = s.metric(USED, &[("pod", &large)], |used| used > Some(10 * GI)).await?;
        ensure!(small_bytes < large_bytes, "each shows its own");
        let samples = s.metrics(NODE).await?;
        let device = samples.devices_of(&small);
        ensure!(device == samples.devices_of(&large), "they share a device");
        let device = device.first().context("a device")?;
        let sum: f64 = samples.values(USED, &[("device", device)]).iter().sum();
        let pods =
            samples.value("highwater_device_memory_bytes", &[("device", device), ("bucket", "pods")])?;
        ensure!(pods == Some(sum), "pods bucket {pods:?}, sum of pods {sum}");
        let per_pod = samples.values(USED, &[("pod", &small)]);
        ensure!(per_pod.len() == 1, "one series a pod and device, not one a replica or process: {per_pod:?}");
        Ok(())
    })
}

#[test]
fn m09_an_idle_pod_has_a_series_from_admission_on() -> Result<()> {
    scenario("m09-idle", async |s| {
        s.apply(&deployment("idle", "hold")).await?;
        let pod = s.running("idle").await?.name_any();
        s.metric(USED, &[("pod", &pod)], |used| used == Some(0)).await?;
        Ok(())
    })
}

#[test]
fn m07_a10_a_pod_with_whole_gpus_has_the_same_series_one_for_each() -> Result<()> {
    scenario("m07-whole", async |s| {
        // Of several shares each is of another device; this pod has all of both.
        let shares = i32::try_from(s.cluster.spec.gpu_replicas)? * i32::from(s.cluster.spec.gpus);
        s.apply(&ModelServer::new("whole", "context; alloc 4Gi; serve").gpus(shares).deployment()).await?;
        let pod = s.running("whole").await?.name_any();
        s.metric(USED, &[("pod", &pod), ("device", "0")], |used| used > Some(4 * GI)).await?;
        s.metric(USED, &[("pod", &pod), ("device", "1")], |used| used == Some(0)).await?;
        Ok(())
    })
}

#[test]
fn m10_every_series_carries_the_node() -> Result<()> {
    scenario("m10-node", async |s| {
        let page = s.page(&s.agent(NODE).await?, 9440, "/metrics").await?;
        let label = format!("node=\"{NODE}\"");
        for line in page.lines().filter(|line| line.starts_with("highwater_")) {
            ensure!(line.contains(&label), "without {label}: {line}");
        }
        Ok(())
    })
}

#[test]
fn m11_metrics_are_well_formed_and_a_host_oom_is_not_taken_for_a_gpu_oom() -> Result<()> {
    scenario("m11-lint", async |s| {
        // Killed by the kernel for host memory, twice as much as it may have.
        let mut greedy = deployment("greedy", "hold");
        let container = &mut greedy["spec"]["template"]["spec"]["containers"][0];
        container["command"] =
            json!(["/bin/busybox", "sh", "-c", "exec /bin/busybox dd if=/dev/zero of=/dev/null bs=256M"]);
        container["resources"]["limits"]["memory"] = json!("64Mi");
        s.apply(&greedy).await?;
        eventually("the host's OOM kill in its own metric", TIMEOUT, async || {
            let kills = s
                .metrics(NODE)
                .await?
                .values("highwater_pod_host_oom_kills_total", &[("namespace", &s.namespace)]);
            ensure!(kills.iter().sum::<f64>() >= 1.0, "{kills:?}");
            Ok(())
        })
        .await?;
        ensure!(s.incidents().await?.is_empty(), "a host OOM is not an incident of GPU memory");
        let agent = s.agent(NODE).await?;
        promtool_check(&s.page(&agent, 9440, "/metrics").await?)?;
        for operator in s.operators().await? {
            promtool_check(&s.page(&operator, 9441, "/metrics").await?)?;
        }
        Ok(())
    })
}

#[test]
fn a_real_prometheus_answers_every_query_of_the_dashboard() -> Result<()> {
    scenario("dashboard", async |s| {
        // A story, so that there is something to show.
        s.apply(&policy("dashboard", {
            let mut spec = enforce(&s.namespace, "16Gi");
            spec["breakers"] = json!([{"scope": "Device", "warning": {"tripPercent": 75, "clearPercent": 70, "actions": []}}]);
            spec
        }))
        .await?;
        s.programmed("dashboard").await?;
        s.apply(&deployment("quiet", "context; alloc 4Gi; serve")).await?;
        s.apply(&deployment("hog", "context; hold 2s; alloc 20Gi; hold")).await?;
        let hog = s.running("hog").await?;
        s.incident(&hog, highwater_crds::DecisionState::Succeeded, "MemoryReturned").await?;
        let quiet = s.running("quiet").await?.name_any();

        let dashboard = dashboard(s).await?;
        let prometheus = s.cluster.prometheus().await?;
        let variables =
            BTreeMap::from([("node", NODE), ("namespace", s.namespace.as_str()), ("pod", quiet.as_str())]);
        let queries = queries(&dashboard);
        ensure!(queries.len() >= 10, "only {} queries", queries.len());
        for (panel, query) in queries {
            let query = substitute(&query, &variables);
            eventually(&format!("data for panel {panel:?}: {query}"), Duration::from_mins(1), async || {
                let answer = prometheus.query(&query).await?;
                ensure!(!answer.is_empty(), "no data");
                Ok(())
            })
            .await?;
        }
        Ok(())
    })
}

async fn dashboard(s: &Scenario) -> Result<Value> {
    let maps = s
        .cluster
        .kubectl([
            "get",
            "configmap",
            "-n",
            highwater_scenarios::SYSTEM,
            "-l",
            "grafana_dashboard=1",
            "-o",
            "json",
        ])
        .await?;
    let maps: Value = serde_json::from_str(&maps)?;
    let data = maps["items"][0]["data"].as_object().context("no dashboard was installed")?;
    let text = data.values().next().and_then(Value::as_str).context("an empty dashboard")?;
    Ok(serde_json::from_str(text)?)
}

/// Every query of every panel, rows included, with the panel's title.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        let title = panel["title"].as_str().unwrap_or("?").to_owned();
        let targets = panel["targets"].as_array().into_iter().flatten();
        found.extend(targets.filter_map(|target| Some((title.clone(), target["expr"].as_str()?.to_owned()))));
        found.extend(queries(panel));
    }
    found
}

/// What Grafana would put in for its variables.
fn substitute(query: &str, variables: &BTreeMap<&str, &str>) -> String {
    let mut query =
        query.replace("$__rate_interval", "1m").replace("$__range", "10m").replace("$__interval", "30s");
    for (name, value) in variables {
        query = query.replace(&format!("${{{name}:regex}}"), value).replace(&format!("${{{name}}}"), value);
        query = query.replace(&format!("${name}"), value);
    }
    query
}

fn promtool_check(page: &str) -> Result<()> {
    let mut promtool = std::process::Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("promtool (Debian package prometheus)")?;
    promtool.stdin.take().context("its input")?.write_all(page.as_bytes())?;
    let output = promtool.wait_with_output()?;
    if !output.status.success() || !output.stdout.is_empty() || !output.stderr.is_empty() {
        bail!(
            "promtool check metrics:\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
