//! Reading metrics in the Prometheus text format.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// The samples of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Samples {
    /// Scrapes `http://address/metrics`.
    pub async fn scrape(address: &str) -> Result<Self> {
        parse_metrics(&get(address, "/metrics").await?)
    }

    /// Every value of a metric whose labels include the given ones.
    pub fn values(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        self.0
            .iter()
            .filter(|sample| sample.name == name)
            .filter(|sample| {
                labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
            })
            .map(|sample| sample.value)
            .collect()
    }

    /// The one value of a metric with these labels; `None` where there is no such series.
    ///
    /// Fails where there are several.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Result<Option<f64>> {
        match self.values(name, labels).as_slice() {
            [] => Ok(None),
            [value] => Ok(Some(*value)),
            several => bail!("{name}{labels:?} has {} series, not one", several.len()),
        }
    }

    /// The one value of a metric with these labels, as whole bytes.
    pub fn bytes(&self, name: &str, labels: &[(&str, &str)]) -> Result<Option<i64>> {
        #[allow(clippy::cast_possible_truncation)] // sizes in bytes are whole and below 2^53
        Ok(self.value(name, labels)?.map(|value| value as i64))
    }

    /// The sum of a metric over every series with these labels, as whole bytes.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> i64 {
        #[allow(clippy::cast_possible_truncation)] // sizes in bytes are whole and below 2^53
        let sum = self.values(name, labels).iter().sum::<f64>() as i64;
        sum
    }

    /// Fails where the buckets of a device are not all of it.
    pub fn adds_up(&self, device: &str) -> Result<()> {
        let labels = [("device", device)];
        let capacity = self.bytes("highwater_device_capacity_bytes", &labels)?.context("a capacity")?;
        let buckets = self.sum("highwater_device_memory_bytes", &labels);
        ensure!(buckets == capacity, "device {device}: the buckets add up to {buckets} of {capacity}");
        Ok(())
    }

    /// The values that a label takes in a metric where its other labels are these.
    pub fn labels(&self, name: &str, labels: &[(&str, &str)], label: &str) -> Vec<String> {
        let found = self.0.iter().filter(|sample| {
            let fits = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|v| v == value);
            sample.name == name && labels.iter().all(fits)
        });
        found.filter_map(|sample| sample.labels.get(label).cloned()).collect()
    }

    /// The devices on which a pod has a series.
    pub fn devices_of(&self, pod: &str) -> Vec<String> {
        let used = self.0.iter().filter(|sample| sample.name == "highwater_pod_memory_used_bytes");
        used.filter(|sample| sample.labels.get("pod").is_some_and(|name| name == pod))
            .filter_map(|sample| sample.labels.get("device").cloned())
            .collect()
    }

    /// The values that a label takes in a metric.
    pub fn label_values(&self, name: &str, label: &str) -> Vec<String> {
        let mut values: Vec<_> = self
            .0
            .iter()
            .filter(|sample| sample.name == name)
            .filter_map(|sample| sample.labels.get(label).cloned())
            .collect();
        values.sort_unstable();
        values.dedup();
        values
    }
}

/// Parses the text format: as much of it as our own processes write.
pub fn parse_metrics(text: &str) -> Result<Samples> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| parse_line(line).ok_or_else(|| anyhow!("not a sample: {line}")))
        .collect::<Result<_>>()
        .map(Samples)
}

fn parse_line(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        None => (series, BTreeMap::new()),
        Some((name, rest)) => (name, parse_labels(rest.strip_suffix('}')?)?),
    };
    Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
}

fn parse_labels(mut text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (key, rest) = text.split_once("=\"")?;
        let (value, rest) = rest.split_once('"')?;
        labels.insert(key.to_owned(), value.to_owned());
        text = rest.strip_prefix(',').unwrap_or(rest);
    }
    Some(labels)
}

/// The body of `http://address/path`. Fails where the status is not 200.
pub(crate) async fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    let (head, body) = response.split_once("\r\n\r\n").context("not an HTTP response")?;
    let status = head.lines().next().unwrap_or_default();
    if !status.contains(" 200") {
        bail!("{address}{path}: {status}");
    }
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_by_name_and_labels() {
        let text = "# HELP a b\na{x=\"1\",y=\"two\"} 3\na{x=\"2\"} 4e3\nb 5\n";
        let samples = parse_metrics(text).unwrap();
        assert_eq!(samples.value("a", &[("x", "1")]).unwrap(), Some(3.0));
        assert_eq!(samples.bytes("a", &[("x", "2")]).unwrap(), Some(4000));
        assert_eq!(samples.value("b", &[]).unwrap(), Some(5.0));
        assert_eq!(samples.value("c", &[]).unwrap(), None);
        assert!(samples.value("a", &[]).is_err());
        assert_eq!(samples.sum("a", &[]), 4003);
        assert_eq!(samples.labels("a", &[("x", "1")], "y"), ["two"]);
        assert!(samples.labels("a", &[("x", "2")], "y").is_empty());
        assert!(parse_metrics("garbage").is_err());
    }
}
