//! The endpoint at which a pod serves its framework's numbers.

use highwater_crds::names;
use k8s_openapi::{api::core::v1::PodSpec, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{AnnotationError, annotation};

/// The path where none is given.
const PATH: &str = "/metrics";
/// The longest path, in bytes.
const LONGEST: usize = 256;

/// An endpoint on the pod's own address that serves Prometheus' text format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsEndpoint {
    /// The port.
    pub port: u16,
    /// The path.
    pub path: String,
}

/// What a pod says in its annotation.
pub(super) fn endpoint(
    meta: &ObjectMeta,
    spec: Option<&PodSpec>,
) -> Result<Option<MetricsEndpoint>, AnnotationError> {
    let key = names::POD_METRICS;
    let Some(text) = annotation(meta, key) else { return Ok(None) };
    let wrong = |reason: &str| AnnotationError { key, reason: reason.to_owned() };
    if spec.is_some_and(|s| s.host_network == Some(true)) {
        return Err(wrong("a pod in the node's network has no address of its own to be asked at"));
    }
    let (port, path) = match text.find('/') {
        Some(at) => text.split_at(at),
        None => (text, PATH),
    };
    let port = port.parse().ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| wrong("write a port, or a port and a path, such as 8000/metrics"))?;
    // It goes into a request as it is.
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"/-_.~%?=&+:,".contains(&c);
    if path.len() > LONGEST || !path.bytes().all(plain) {
        return Err(wrong("the path may have letters, digits and /-_.~%?=&+:, and be 256 bytes long"));
    }
    Ok(Some(MetricsEndpoint { port, path: path.to_owned() }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(text: &str, host_network: bool) -> Result<Option<MetricsEndpoint>, AnnotationError> {
        let meta = serde_json::from_value(json!({"annotations": {"highwater.dev/metrics": text}})).unwrap();
        let spec = serde_json::from_value(json!({"containers": [], "hostNetwork": host_network})).unwrap();
        endpoint(&meta, Some(&spec))
    }

    #[test]
    fn an_endpoint_is_a_port_and_perhaps_a_path() {
        let at = |port, path: &str| Ok(Some(MetricsEndpoint { port, path: path.into() }));
        assert_eq!(parse("8000", false), at(8000, "/metrics"));
        assert_eq!(parse("9400/stats?x=1", false), at(9400, "/stats?x=1"));
        assert_eq!(endpoint(&ObjectMeta::default(), None), Ok(None));
    }

    #[test]
    fn what_is_no_endpoint_of_the_pod_itself_is_refused() {
        for text in
            ["", "0", "70000", "http", "http://other/metrics", "8000/a b", "8000/a\r\nX: y", "8000@x/"]
        {
            assert!(parse(text, false).is_err(), "{text:?}");
        }
        assert!(parse(&format!("8000/{}", "a".repeat(256)), false).is_err());
        assert!(parse("8000", true).is_err(), "the node's own ports are not a pod's");
    }
}
