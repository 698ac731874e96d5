//! A real Prometheus in the cluster's network that scrapes the product.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::{
    Cluster,
    control::{self, Component, Request},
    eventually,
    namespace::Place,
    paths::{Paths, write},
};

/// Where it answers, inside the cluster's network.
pub const ADDRESS: &str = "127.0.0.1:9090";

const SERVER: &str = "prometheus";
const DISCOVERY: &str = "prometheus-discovery";

/// Starts it, or starts it anew with empty data.
pub fn start(paths: &Paths) -> Result<()> {
    stop(paths)?;
    let data = paths.data.join("prometheus");
    let _ = fs::remove_dir_all(&data);
    let file = paths.state.join("prometheus.yaml");
    write(&targets_file(paths), "[]")?;
    write(&file, configuration(&targets_file(paths)))?;
    let place = || Place::Network(paths.id.network());
    let discovery = Component::new(DISCOVERY, place(), paths.program("cluster"), ["discover"]);
    let server = Component::new(
        SERVER,
        place(),
        "/usr/bin/prometheus".into(),
        [
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", data.display()),
            format!("--web.listen-address={ADDRESS}"),
        ],
    );
    for component in [discovery, server] {
        control::send(paths, &Request::Add(component))?;
    }
    Ok(())
}

/// Ends it, if it runs.
pub fn stop(paths: &Paths) -> Result<()> {
    for component in control::send(paths, &Request::Status)? {
        if [SERVER, DISCOVERY].contains(&component.name.as_str()) {
            control::send(paths, &Request::Remove(component.name))?;
        }
    }
    Ok(())
}

/// A running Prometheus to ask; made by [`crate::Cluster::prometheus`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Prometheus;

/// One series of an answer.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Series {
    /// Labels; the metric's name under `__name__`.
    pub metric: BTreeMap<String, String>,
    /// Seconds since 1970, and the value as text.
    pub value: (f64, String),
}

impl Series {
    /// The value as a number.
    pub fn number(&self) -> Result<f64> {
        self.value.1.parse().with_context(|| format!("not a number: {}", self.value.1))
    }
}

#[derive(Deserialize)]
struct Answer {
    error: Option<String>,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<Series>,
}

impl Prometheus {
    /// Waits until it has loaded its configuration.
    pub(crate) async fn ready() -> Result<Self> {
        eventually("Prometheus' readiness", Duration::from_secs(30), async || get("/-/ready").await).await?;
        Ok(Self)
    }

    /// The instant vector that an expression gives now.
    pub async fn query(&self, expression: &str) -> Result<Vec<Series>> {
        let body = get(&format!("/api/v1/query?query={}", encode(expression))).await?;
        let answer: Answer = serde_json::from_str(&body).with_context(|| format!("reading {body}"))?;
        match (answer.error, answer.data) {
            (Some(error), _) => bail!("Prometheus refuses `{expression}`: {error}"),
            (None, Some(data)) => Ok(data.result),
            (None, None) => bail!("Prometheus answers `{expression}` with {body}"),
        }
    }
}

/// Fails where the status is not 200, unless the body is JSON: Prometheus explains itself there.
async fn get(path: &str) -> Result<String> {
    // Version 1.0: the server closes the connection after an answer that is not in chunks.
    let request = format!("GET {path} HTTP/1.0\r\nHost: {ADDRESS}\r\n\r\n");
    let mut answer = String::new();
    let exchange = async {
        let mut stream = TcpStream::connect(ADDRESS).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.read_to_string(&mut answer).await
    };
    timeout(Duration::from_secs(10), exchange)
        .await
        .context("Prometheus does not answer")?
        .context("asking Prometheus")?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
    if head.split(' ').nth(1) != Some("200") && !body.starts_with('{') {
        bail!("Prometheus answers {path} with {}: {body}", head.lines().next().unwrap_or_default());
    }
    Ok(body.to_owned())
}

fn encode(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

fn configuration(targets: &Path) -> String {
    format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: highwater
  # The pod that a series tells about is never the one that tells it.
  honor_labels: true
  file_sd_configs: [{{files: [\"{}\"]}}]
",
        targets.display()
    )
}

/// Keeps Prometheus' list of targets current, for ever: the Prometheus that Debian builds cannot
/// ask Kubernetes itself.
pub async fn discover(cluster: &Cluster) -> Result<()> {
    let pods: Api<Pod> = Api::all(cluster.client().await?);
    let ours = ListParams::default().labels("app.kubernetes.io/part-of=highwater");
    let mut written = Value::Null;
    loop {
        // The API server may be away, as a test likes.
        if let Ok(list) = pods.list(&ours).await {
            let targets = targets(&list.items);
            if targets != written {
                let fresh = targets_file(&cluster.paths).with_extension("new");
                write(&fresh, targets.to_string())?;
                fs::rename(&fresh, targets_file(&cluster.paths))?;
                written = targets;
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// Every container port named `metrics` of a pod that runs, with the labels that the chart's
/// PodMonitor gives.
fn targets(pods: &[Pod]) -> Value {
    let mut found = Vec::new();
    for pod in pods {
        let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else { continue };
        let (Some("Running"), Some(address)) = (status.phase.as_deref(), &status.pod_ip) else { continue };
        let component = pod.labels().get("app.kubernetes.io/component").map_or("", String::as_str);
        let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
        for port in ports.filter(|port| port.name.as_deref() == Some("metrics")) {
            let target = format!("{address}:{}", port.container_port);
            // A new agent goes on with the series of the old one.
            let instance = match &spec.node_name {
                Some(node) if component == "agent" => node.clone(),
                _ => target.clone(),
            };
            let labels = json!({"job": format!("highwater-{component}"), "instance": instance});
            found.push(json!({"targets": [target], "labels": labels}));
        }
    }
    Value::Array(found)
}

fn targets_file(paths: &Paths) -> PathBuf {
    paths.state.join("prometheus-targets.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_run_are_scraped_at_their_metrics_port_alone() {
        let pod = |component: &str, phase: &str| -> Pod {
            let ports =
                json!([{"name": "metrics", "containerPort": 9440}, {"name": "other", "containerPort": 1}]);
            serde_json::from_value(json!({
                "metadata": {"labels": {"app.kubernetes.io/component": component}},
                "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": ports}]},
                "status": {"phase": phase, "podIP": "10.222.1.2"},
            }))
            .unwrap()
        };
        let found = targets(&[pod("agent", "Running"), pod("operator", "Running"), pod("agent", "Pending")]);
        let expected = json!([
            {"targets": ["10.222.1.2:9440"], "labels": {"job": "highwater-agent", "instance": "n1"}},
            {"targets": ["10.222.1.2:9440"], "labels": {"job": "highwater-operator", "instance": "10.222.1.2:9440"}},
        ]);
        assert_eq!(found, expected);
    }

    #[test]
    fn a_query_is_percent_encoded() {
        assert_eq!(encode("up{a=\"b\"} > 1"), "up%7Ba%3D%22b%22%7D%20%3E%201");
    }
}
