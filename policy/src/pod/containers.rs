//! The containers of a pod: which runs now, and how the one before it ended.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerState, ContainerStatus, Pod};

use super::asks_for_gpu;

/// The longest that the images of a pod may be in text.
const IMAGES: usize = 512;

/// A container of a pod, as its status says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerFacts {
    /// Name.
    pub name: String,
    /// ID of the present one, or of the last while none runs; empty before the first. It differs after
    /// each start.
    pub id: String,
    /// When that one started.
    pub started: Option<Timestamp>,
    /// How the last one that ended did so.
    pub ended: Option<Ended>,
}

/// How a container ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Its ID.
    pub id: String,
    /// Its exit code.
    pub exit_code: i32,
    /// The host had no memory for it.
    pub out_of_memory: bool,
}

/// The containers of a pod that ask for a GPU, or all where none does, in the order of their names: a
/// container beside them that is started anew ends no life on the device.
pub(super) fn containers(pod: &Pod) -> Vec<ContainerFacts> {
    let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
    let spec = pod.spec.iter().flat_map(|spec| &spec.containers);
    let asking: Vec<&str> = spec.filter(|c| asks_for_gpu(c)).map(|c| c.name.as_str()).collect();
    let counts = |status: &&ContainerStatus| asking.is_empty() || asking.contains(&status.name.as_str());
    let mut containers: Vec<ContainerFacts> = statuses.iter().filter(counts).map(container).collect();
    containers.sort_by(|a, b| a.name.cmp(&b.name));
    containers
}

fn container(status: &ContainerStatus) -> ContainerFacts {
    let started = status.state.as_ref().and_then(|state| {
        let running = state.running.as_ref().and_then(|running| running.started_at.as_ref());
        running.or(state.terminated.as_ref().and_then(|ended| ended.started_at.as_ref()))
    });
    ContainerFacts {
        name: status.name.clone(),
        id: bare(status.container_id.as_deref()),
        started: started.map(|at| at.0),
        ended: ended(status.state.as_ref()).or_else(|| ended(status.last_state.as_ref())),
    }
}

fn ended(state: Option<&ContainerState>) -> Option<Ended> {
    let ended = state?.terminated.as_ref()?;
    Some(Ended {
        id: bare(ended.container_id.as_deref()),
        exit_code: ended.exit_code,
        out_of_memory: ended.reason.as_deref() == Some("OOMKilled"),
    })
}

/// An ID without the runtime's name before it.
fn bare(id: Option<&str>) -> String {
    let id = id.unwrap_or("");
    id.split_once("://").map_or(id, |(_, id)| id).to_owned()
}

/// The images of the containers that ask for a GPU, or of all where none does: what makes a pod another
/// program.
pub(super) fn images(pod: &Pod) -> String {
    let containers = || pod.spec.iter().flat_map(|spec| &spec.containers);
    let image = |container: &Container| container.image.clone();
    let mut images: Vec<String> = containers().filter(|c| asks_for_gpu(c)).filter_map(image).collect();
    if images.is_empty() {
        images = containers().filter_map(image).collect();
    }
    images.join(" ").chars().take(IMAGES).collect()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_container_that_was_started_anew_says_how_the_one_before_ended() {
        let status = json!([
            {"name": "web", "image": "", "imageID": "", "ready": true, "restartCount": 0,
             "containerID": "containerd://w", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}},
            {"name": "server", "image": "", "imageID": "", "ready": true, "restartCount": 1,
             "containerID": "containerd://two", "state": {"running": {"startedAt": "2026-01-01T01:00:00Z"}},
             "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled",
                                          "containerID": "containerd://one"}}}]);
        let found = containers(&pod(json!({"metadata": {}, "status": {"containerStatuses": status}})));
        let [server, web] = found.try_into().unwrap();
        assert_eq!((server.name.as_str(), server.id.as_str()), ("server", "two"));
        assert_eq!(server.started, "2026-01-01T01:00:00Z".parse::<Timestamp>().ok());
        assert_eq!(server.ended, Some(Ended { id: "one".into(), exit_code: 137, out_of_memory: true }));
        assert_eq!((web.id.as_str(), web.ended), ("w", None));
    }

    #[test]
    fn a_container_that_has_ended_is_known_until_the_next_one_starts() {
        let status = json!([{"name": "server", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "containerID": "containerd://one",
            "state": {"terminated": {"exitCode": 0, "containerID": "containerd://one",
                                     "startedAt": "2026-01-01T00:00:00Z"}}}]);
        let found = containers(&pod(json!({"metadata": {}, "status": {"containerStatuses": status}})));
        assert_eq!(found[0].id, "one");
        assert_eq!(found[0].ended.as_ref().map(|ended| ended.exit_code), Some(0));
        assert!(containers(&pod(json!({"metadata": {}}))).is_empty());
    }

    #[test]
    fn images_are_those_of_containers_that_ask_for_a_gpu() {
        let gpu = json!({"limits": {"nvidia.com/gpu": "1"}});
        let spec = json!({"containers": [{"name": "a", "image": "server:1", "resources": gpu},
                                         {"name": "b", "image": "sidecar:9"}]});
        assert_eq!(images(&pod(json!({"metadata": {}, "spec": spec}))), "server:1");
        let spec = json!({"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]});
        assert_eq!(images(&pod(json!({"metadata": {}, "spec": spec}))), "x y");
    }
}
