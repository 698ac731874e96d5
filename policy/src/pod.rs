//! What Highwater needs to know about a pod, and whether a rule or an act may concern it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use highwater_crds::{ByteSize, names};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Container, Namespace, Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use kube::core::{Selector, SelectorExt};

mod containers;
mod metrics;

pub use self::{
    containers::{ContainerFacts, Ended},
    metrics::MetricsEndpoint,
};

/// Label values by label key.
pub type Labels = BTreeMap<String, String>;

/// Priority from which on a pod belongs to the system.
const SYSTEM_PRIORITY: i32 = 2_000_000_000;
/// Annotation that the kubelet puts on the API's copy of a static pod.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// The facts of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct PodFacts {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID: a later pod of the same name has another.
    pub uid: String,
    /// Labels.
    pub labels: Labels,
    /// The owner that controls it.
    pub owner: Option<Owner>,
    /// Priority; 0 where none is set.
    pub priority: i32,
    /// Belongs to the system by its priority or priority class.
    pub system_priority: bool,
    /// A static pod's copy in the API. The kubelet knows it by another UID: see
    /// [`Self::static_uid`].
    pub mirror: bool,
    /// The UID that the kubelet uses for a static pod, in its directories and cgroups.
    pub static_uid: Option<String>,
    /// Asked to end.
    pub terminating: bool,
    /// When it ought to have ended, its grace period included, if it was asked to.
    pub ends_at: Option<Timestamp>,
    /// Every container ended for good.
    pub finished: bool,
    /// New acts on this pod are switched off.
    pub paused: bool,
    /// Has the volume by which it opted in to signals.
    pub signal_volume: bool,
    /// What it opted in to be asked by `Hook`.
    pub hook: Option<Hook>,
    /// A readiness probe of it runs the helper on the file that signals come in.
    pub unready: bool,
    /// It opted in to be parked.
    pub park: bool,
    /// It agreed to be restarted where it is, and its containers are started anew whatever they end
    /// with.
    pub restart_in_place: bool,
    /// Its own address. `None` while it has none, or where it shares the node's.
    pub pod_ip: Option<IpAddr>,
    /// It shares the node's network.
    pub host_network: bool,
    /// Whether the guard is brought into it.
    pub guard: GuardOptIn,
    /// The node that it is bound to.
    pub node: Option<String>,
    /// Its own, lower limit.
    pub limit: Option<ByteSize>,
    /// The part that it preallocates by design.
    pub declared: Option<ByteSize>,
    /// Annotations that are ignored, and why.
    pub annotation_errors: Vec<AnnotationError>,
    /// IDs of containers that ended because the host had no memory for them, as far as the pod's
    /// status remembers. That says nothing about GPU memory.
    pub host_oom_killed: BTreeSet<String>,
    /// Its containers, in the order of their names.
    pub containers: Vec<ContainerFacts>,
    /// The images of its containers that ask for a GPU, or of all of them where none does.
    pub images: String,
    /// Where it serves its framework's numbers.
    pub metrics: Option<MetricsEndpoint>,
}

/// What a pod's engine serves, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// What is asked of it.
    pub preset: HookPreset,
    /// The port, of the name that the pod gave.
    pub port: u16,
}

/// The endpoints that are known of engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookPreset {
    /// vLLM: drop the prefix cache.
    VllmResetPrefixCache,
    /// vLLM: sleep, and wake up once there is room.
    VllmSleep,
    /// SGLang: flush the cache.
    SglangFlushCache,
    /// Triton: unload a model.
    TritonUnload {
        /// The model.
        model: String,
    },
}

impl HookPreset {
    /// The name that a pod writes, and that metrics have.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::VllmResetPrefixCache => "VllmResetPrefixCache",
            Self::VllmSleep => "VllmSleep",
            Self::SglangFlushCache => "SglangFlushCache",
            Self::TritonUnload { .. } => "TritonUnload",
        }
    }

    /// Path and query of the `POST` by which memory is freed.
    pub fn path(&self) -> String {
        match self {
            Self::VllmResetPrefixCache => "/reset_prefix_cache".to_owned(),
            Self::VllmSleep => "/sleep?level=1".to_owned(),
            Self::SglangFlushCache => "/flush_cache".to_owned(),
            Self::TritonUnload { model } => format!("/v2/repository/models/{model}/unload"),
        }
    }

    /// Path of the `POST` that takes it back at level Normal, where there is one.
    pub const fn way_back(&self) -> Option<&'static str> {
        match self {
            Self::VllmSleep => Some("/wake_up"),
            Self::VllmResetPrefixCache | Self::SglangFlushCache | Self::TritonUnload { .. } => None,
        }
    }

    /// Names of every preset.
    const NAMES: &'static str = "VllmResetPrefixCache, VllmSleep, SglangFlushCache or TritonUnload";

    fn parse(name: &str, model: Option<&str>) -> Result<Self, String> {
        Ok(match name {
            "VllmResetPrefixCache" => Self::VllmResetPrefixCache,
            "VllmSleep" => Self::VllmSleep,
            "SglangFlushCache" => Self::SglangFlushCache,
            "TritonUnload" => Self::TritonUnload { model: model_name(model)?.to_owned() },
            other => return Err(format!("{other:?} is no preset: write {}", Self::NAMES)),
        })
    }
}

/// A model's name goes into a path as it is.
fn model_name(model: Option<&str>) -> Result<&str, String> {
    let key = names::POD_HOOK_MODEL;
    let name = model.ok_or_else(|| format!("TritonUnload needs to know which model: write it in {key}"))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let sound = (1..=128).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.');
    sound.then_some(name).ok_or_else(|| {
        format!("{name:?} in {key} is no model: write letters, digits, '-', '_' and '.', at most 128, not '.' first")
    })
}

/// Whether the guard is brought into a pod, as far as its spec tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GuardOptIn {
    /// It is not asked for.
    #[default]
    No,
    /// It is asked for by the label, and nothing brought it in: the cluster does not add it
    /// (Kubernetes before 1.36), or some container that asks for a GPU lacks its mounts.
    Asked,
    /// The volume is there, and every container that asks for a GPU has it.
    Volume,
}

/// The controller of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// API version, such as `apps/v1`.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// An annotation that could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct AnnotationError {
    /// The annotation.
    pub key: &'static str,
    /// What is wrong and what to write instead.
    pub reason: String,
}

impl fmt::Display for AnnotationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, reason } = self;
        let instead = match *key {
            names::POD_HOOK => "the pod's engine is asked nothing",
            names::POD_RESTART => "the pod is evicted where it would be restarted in place",
            names::POD_METRICS => "the numbers of the pod's framework are not known",
            _ => "the policy's quota holds",
        };
        write!(f, "annotation {key} is ignored and {instead}: {reason}")
    }
}

impl PodFacts {
    /// Reads a pod. An annotation that makes no sense becomes an entry of
    /// [`annotation_errors`](Self::annotation_errors), never a failure.
    pub fn parse(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let priority = spec.and_then(|s| s.priority).unwrap_or(0);
        let class = spec.and_then(|s| s.priority_class_name.as_deref()).unwrap_or("");
        let mirror = annotation(meta, MIRROR);
        // Anybody may write the annotation. A UID of the API has dashes: it cannot name such a pod.
        let static_uid = mirror.filter(|uid| is_hash(uid)).map(str::to_owned);

        let mut annotation_errors = Vec::new();
        let mut size = |key| {
            size_annotation(meta, key).unwrap_or_else(|error| {
                annotation_errors.push(error);
                None
            })
        };
        let limit = size(names::POD_LIMIT);
        let mut declared = size(names::POD_DECLARED);
        if let (Some(limit), Some(part)) = (limit, declared)
            && part > limit
        {
            annotation_errors.push(AnnotationError {
                key: names::POD_DECLARED,
                reason: format!("{part} is more than {} ({limit}): write at most {limit}", names::POD_LIMIT),
            });
            declared = None;
        }

        let mut known = |result: Result<_, AnnotationError>| {
            result.unwrap_or_else(|error| {
                annotation_errors.push(error);
                None
            })
        };
        let hook = known(hook(meta, spec));
        let metrics = metrics::endpoint(meta, spec).unwrap_or_else(|error| {
            annotation_errors.push(error);
            None
        });
        let mut restart_in_place = false;
        match restart_in_place_of(meta, spec) {
            Ok(agreed) => restart_in_place = agreed,
            Err(error) => annotation_errors.push(error),
        }
        let host_network = spec.is_some_and(|s| s.host_network == Some(true));
        let signal_volume = spec.and_then(|s| s.volumes.as_ref()).is_some_and(|volumes| {
            volumes.iter().any(|v| v.name == names::SIGNAL_VOLUME && v.empty_dir.is_some())
        });

        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            labels: meta.labels.clone().unwrap_or_default(),
            owner: controller(meta),
            priority,
            system_priority: priority >= SYSTEM_PRIORITY || class.starts_with("system-"),
            mirror: mirror.is_some(),
            static_uid,
            terminating: meta.deletion_timestamp.is_some(),
            ends_at: meta.deletion_timestamp.as_ref().map(|at| at.0),
            finished: status
                .and_then(|s| s.phase.as_deref())
                .is_some_and(|phase| matches!(phase, "Succeeded" | "Failed")),
            paused: is_paused(meta),
            signal_volume,
            hook,
            unready: signal_volume && spec.is_some_and(|s| s.containers.iter().any(asks_readiness)),
            park: meta.labels.as_ref().and_then(|l| l.get(names::PARK_LABEL)).is_some_and(|v| v == "true"),
            restart_in_place,
            pod_ip: status
                .and_then(|s| s.pod_ip.as_deref())
                .filter(|_| !host_network)
                .and_then(|ip| ip.parse().ok()),
            host_network,
            guard: guard(meta, spec),
            node: spec.and_then(|s| s.node_name.clone()),
            limit,
            declared,
            annotation_errors,
            host_oom_killed: host_oom_killed(pod),
            containers: containers::containers(pod),
            images: containers::images(pod),
            metrics,
        }
    }

    /// The UID by which the kubelet knows the pod.
    pub fn kubelet_uid(&self) -> &str {
        self.static_uid.as_deref().unwrap_or(&self.uid)
    }
}

/// What begins the name of a resource that stands for a GPU.
const GPU_RESOURCES: [&str; 2] = ["nvidia.com/gpu", "nvidia.com/mig-"];

/// Whether the spec brings the guard in. As in the admission policies: a container that asks for a
/// GPU needs the volume and the loader's file; where none asks (the GPU is claimed otherwise), one
/// with them is enough.
fn guard(meta: &ObjectMeta, spec: Option<&PodSpec>) -> GuardOptIn {
    let volume = spec.and_then(|s| guard_volume(s));
    let containers =
        || spec.into_iter().flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    let guarded = |container: &Container| {
        let mounts = container.volume_mounts.as_deref().unwrap_or_default();
        let mounted =
            |path: &str| mounts.iter().any(|m| Some(m.name.as_str()) == volume && m.mount_path == path);
        mounted(names::GUARD_MOUNT) && mounted(names::GUARD_PRELOAD)
    };
    let mut asking = containers().filter(|c| asks_for_gpu(c)).peekable();
    let whole = if asking.peek().is_some() { asking.all(guarded) } else { containers().any(guarded) };
    let labelled = meta.labels.as_ref().and_then(|l| l.get(names::GUARD_LABEL)).is_some_and(|v| v == "true");
    match (volume.is_some() && whole, labelled || volume.is_some()) {
        (true, _) => GuardOptIn::Volume,
        (false, true) => GuardOptIn::Asked,
        (false, false) => GuardOptIn::No,
    }
}

/// The name of the volume that brings the guard in.
fn guard_volume(spec: &PodSpec) -> Option<&str> {
    let ours = |csi: &k8s_openapi::api::core::v1::CSIVolumeSource| csi.driver == names::GUARD_DRIVER;
    let volume = spec.volumes.as_ref()?.iter().find(|v| v.csi.as_ref().is_some_and(ours))?;
    Some(&volume.name)
}

/// What a pod opted in to be asked, from its annotations and the names of its ports.
fn hook(meta: &ObjectMeta, spec: Option<&PodSpec>) -> Result<Option<Hook>, AnnotationError> {
    let key = names::POD_HOOK;
    let Some(text) = annotation(meta, key) else { return Ok(None) };
    let wrong = |reason| AnnotationError { key, reason };
    if spec.is_some_and(|s| s.host_network == Some(true)) {
        return Err(wrong("a pod in the node's network has no address of its own to be asked at".into()));
    }
    let (preset, port) = text.split_once(':').unwrap_or((text, "http"));
    let preset = HookPreset::parse(preset, annotation(meta, names::POD_HOOK_MODEL)).map_err(wrong)?;
    let ports = spec.into_iter().flat_map(|s| &s.containers).flat_map(|c| c.ports.iter().flatten());
    let named = ports
        .filter(|p| p.name.as_deref() == Some(port) && p.protocol.as_deref().unwrap_or("TCP") == "TCP")
        .find_map(|p| u16::try_from(p.container_port).ok().filter(|port| *port > 0));
    let missing =
        || wrong(format!("no container has a TCP port named {port:?}: name the port, or write Preset:port"));
    Ok(Some(Hook { preset, port: named.ok_or_else(missing)? }))
}

/// Whether a pod agreed to be restarted where it is, and would be started anew.
fn restart_in_place_of(meta: &ObjectMeta, spec: Option<&PodSpec>) -> Result<bool, AnnotationError> {
    let key = names::POD_RESTART;
    let wrong = |reason: String| Err(AnnotationError { key, reason });
    let policy = spec.and_then(|s| s.restart_policy.as_deref()).unwrap_or("Always");
    match annotation(meta, key) {
        None => Ok(false),
        Some(names::RESTART_IN_PLACE) if policy == "Always" => Ok(true),
        Some(names::RESTART_IN_PLACE) => wrong(format!(
            "containers of a pod with restartPolicy {policy} would not be started anew: it takes Always"
        )),
        Some(other) => wrong(format!("{other:?} is unknown: write {}", names::RESTART_IN_PLACE)),
    }
}

/// Whether a container's readiness is what the helper says of the file that signals come in.
fn asks_readiness(container: &Container) -> bool {
    let command = container.readiness_probe.as_ref().and_then(|p| p.exec.as_ref()?.command.as_deref());
    let Some([program, path]) = command else { return false };
    let mounts = container.volume_mounts.as_deref().unwrap_or_default();
    let file = mounts.iter().filter(|m| m.name == names::SIGNAL_VOLUME).map(|mount| {
        let folder = mount.mount_path.trim_end_matches('/');
        format!("{folder}/{}", names::SIGNAL_FILE)
    });
    program == names::READY_HELPER && file.into_iter().any(|file| file == *path)
}

/// Whether a pod has a volume of the guard's driver.
pub fn has_guard_volume(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(guard_volume).is_some()
}

fn asks_for_gpu(container: &Container) -> bool {
    let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
    limits.is_some_and(|limits| {
        limits.keys().any(|name| GPU_RESOURCES.iter().any(|prefix| name.starts_with(prefix)))
    })
}

/// The facts of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Labels.
    pub labels: Labels,
    /// New acts in this namespace are switched off.
    pub paused: bool,
}

impl NamespaceFacts {
    /// Reads a namespace.
    pub fn parse(namespace: &Namespace) -> Self {
        Self::from_metadata(&namespace.metadata)
    }

    /// Reads a namespace from its metadata alone.
    pub fn from_metadata(meta: &ObjectMeta) -> Self {
        Self { labels: meta.labels.clone().unwrap_or_default(), paused: is_paused(meta) }
    }
}

/// Whether the annotation of this object switches new acts off.
pub fn is_paused(meta: &ObjectMeta) -> bool {
    annotation(meta, names::PAUSED) == Some("true")
}

/// Whether labels satisfy a selector. A selector that makes no sense selects nothing.
pub fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    Selector::try_from(selector.clone()).is_ok_and(|selector| selector.matches(labels))
}

/// Whether a policy's namespaces include this one. System namespaces and the release namespace
/// are never included, nor is a namespace whose labels are not known.
pub fn selects_namespace(
    selector: Option<&LabelSelector>,
    namespace: &str,
    facts: Option<&NamespaceFacts>,
    release_namespace: &str,
) -> bool {
    let protected = namespace == release_namespace || names::SYSTEM_NAMESPACES.contains(&namespace);
    !protected && facts.is_some_and(|facts| selector.is_none_or(|s| selects(s, &facts.labels)))
}

/// Whether this is what the kubelet makes of a static pod's manifest.
fn is_hash(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

fn size_annotation(meta: &ObjectMeta, key: &'static str) -> Result<Option<ByteSize>, AnnotationError> {
    let Some(text) = annotation(meta, key) else { return Ok(None) };
    match text.parse() {
        Ok(ByteSize(0)) => Err(AnnotationError {
            key,
            reason: "0 would let the pod have nothing: write a size above 0 such as 8Gi, or remove it".into(),
        }),
        Ok(size) => Ok(Some(size)),
        Err(error) => Err(AnnotationError { key, reason: error.to_string() }),
    }
}

fn controller(meta: &ObjectMeta) -> Option<Owner> {
    let owner = meta.owner_references.as_ref()?.iter().find(|o| o.controller == Some(true))?;
    Some(Owner {
        api_version: owner.api_version.clone(),
        kind: owner.kind.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

fn host_oom_killed(pod: &Pod) -> BTreeSet<String> {
    let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
    statuses
        .iter()
        .flat_map(|container| [&container.last_state, &container.state])
        .filter_map(|state| state.as_ref()?.terminated.as_ref())
        .filter(|ended| ended.reason.as_deref() == Some("OOMKilled"))
        .map(|ended| ended.container_id.clone().unwrap_or_default())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(value: Value) -> PodFacts {
        PodFacts::parse(&serde_json::from_value(value).unwrap())
    }

    fn annotated(annotations: &Value) -> PodFacts {
        parse(json!({"metadata": {"name": "p", "namespace": "team", "annotations": annotations}}))
    }

    #[test]
    fn a_pod_is_read_whole() {
        let pod = parse(json!({
            "metadata": {
                "name": "server-0", "namespace": "team", "uid": "u", "labels": {"tier": "serving"},
                "deletionTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"highwater.dev/limit": "8Gi", "highwater.dev/declared": "2Gi",
                                "highwater.dev/paused": "true"},
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "1"},
                    {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "server", "uid": "2", "controller": true}],
            },
            "spec": {"containers": [], "nodeName": "n1", "priority": 7,
                     "volumes": [{"name": "highwater", "emptyDir": {}}]},
            "status": {"phase": "Running", "containerStatuses": [{
                "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 1,
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
        }));
        assert_eq!(pod.owner.as_ref().unwrap().kind, "StatefulSet");
        assert_eq!(pod.limit, Some(ByteSize::gib(8)));
        assert_eq!(pod.declared, Some(ByteSize::gib(2)));
        assert!(pod.terminating && pod.paused && pod.signal_volume && !pod.finished);
        assert_eq!((pod.priority, pod.host_oom_killed.len()), (7, 1));
        assert!(pod.annotation_errors.is_empty());
    }

    #[test]
    fn a_malformed_annotation_is_ignored_and_says_what_to_write() {
        for (text, advice) in [("lots", "suffix"), ("-1Gi", "negative"), ("0", "above 0")] {
            let pod = annotated(&json!({"highwater.dev/limit": text}));
            assert_eq!(pod.limit, None);
            let message = pod.annotation_errors[0].to_string();
            assert!(message.contains("highwater.dev/limit") && message.contains(advice), "{message}");
        }
    }

    #[test]
    fn a_declared_part_above_the_own_limit_is_refused() {
        let pod = annotated(&json!({"highwater.dev/limit": "1Gi", "highwater.dev/declared": "2Gi"}));
        assert_eq!((pod.limit, pod.declared), (Some(ByteSize::gib(1)), None));
        assert!(pod.annotation_errors[0].to_string().contains("at most 1Gi"));
    }

    #[test]
    fn a_hook_is_a_preset_and_a_port_of_that_name() {
        let pod = |hook: &str, spec: Value| {
            let annotations = json!({"highwater.dev/hook": hook, "highwater.dev/hook-model": "llama-7b"});
            parse(json!({"metadata": {"annotations": annotations}, "spec": spec,
                         "status": {"podIP": "10.0.0.7"}}))
        };
        let ports = json!([{"name": "http", "containerPort": 8000}, {"name": "dev", "containerPort": 9000},
                           {"name": "quic", "containerPort": 1, "protocol": "UDP"}]);
        let spec = json!({"containers": [{"name": "c", "ports": ports}]});
        let hook = |text: &str| pod(text, spec.clone()).hook;
        assert_eq!(hook("VllmSleep"), Some(Hook { preset: HookPreset::VllmSleep, port: 8000 }));
        assert_eq!(hook("SglangFlushCache:dev").unwrap().port, 9000);
        let unload = hook("TritonUnload").unwrap().preset;
        assert_eq!(unload.path(), "/v2/repository/models/llama-7b/unload");
        for (text, advice) in
            [("Sleep", "VllmSleep"), ("VllmSleep:grpc", "named \"grpc\""), ("VllmSleep:quic", "TCP")]
        {
            let pod = pod(text, spec.clone());
            assert_eq!(pod.hook, None);
            let message = pod.annotation_errors[0].to_string();
            assert!(message.contains(advice) && message.contains("asked nothing"), "{message}");
        }
        let host = json!({"hostNetwork": true, "containers": [{"name": "c", "ports": ports}]});
        let pod = pod("VllmSleep", host);
        assert_eq!((pod.hook, pod.pod_ip), (None, None), "the node's own ports are not a pod's");
        assert_eq!(
            parse(json!({"metadata": {}, "status": {"podIP": "10.0.0.7"}})).pod_ip,
            "10.0.0.7".parse().ok()
        );
    }

    #[test]
    fn a_model_that_would_be_another_path_is_refused() {
        for model in ["../../reset", "a/b", "", ".", "a%2fb", "a?b", &"m".repeat(129)] {
            assert!(HookPreset::parse("TritonUnload", Some(model)).is_err(), "{model}");
        }
        assert!(HookPreset::parse("TritonUnload", None).unwrap_err().contains("hook-model"));
    }

    #[test]
    fn a_probe_of_the_file_opts_in_to_unready() {
        let pod = |command: Value, volume: Value| {
            parse(json!({"metadata": {}, "spec": {"volumes": [volume], "containers": [{"name": "c",
                "volumeMounts": [{"name": "highwater", "mountPath": "/run/highwater/"}],
                "readinessProbe": {"exec": {"command": command}}}]}}))
            .unready
        };
        let volume = || json!({"name": "highwater", "emptyDir": {}});
        let probe = json!(["/opt/highwater/ready", "/run/highwater/pressure"]);
        assert!(pod(probe.clone(), volume()));
        assert!(!pod(probe, json!({"name": "other", "emptyDir": {}})), "nothing would ever be written");
        for other in
            [json!(["/opt/highwater/ready"]), json!(["/opt/highwater/ready", "/etc/passwd"]), json!(["true"])]
        {
            assert!(!pod(other, volume()));
        }
    }

    #[test]
    fn a_pod_agrees_to_park_by_label_and_to_restart_in_place_by_annotation() {
        let pod = |value: &str, policy: &str| {
            parse(json!({"metadata": {"labels": {"highwater.dev/park": value},
                                      "annotations": {"highwater.dev/restart": "InPlace"}},
                         "spec": {"containers": [], "restartPolicy": policy}}))
        };
        assert!(pod("true", "Always").park && !pod("yes", "Always").park);
        assert!(pod("true", "Always").restart_in_place);
        for policy in ["OnFailure", "Never"] {
            let pod = pod("true", policy);
            assert!(!pod.restart_in_place && pod.annotation_errors[0].to_string().contains("evicted"));
        }
        assert!(!annotated(&json!({"highwater.dev/restart": "Now"})).restart_in_place);
    }

    #[test]
    fn only_an_empty_dir_opts_in_to_signals() {
        let pod = parse(json!({"metadata": {}, "spec": {"containers": [],
            "volumes": [{"name": "highwater", "hostPath": {"path": "/etc"}}]}}));
        assert!(!pod.signal_volume);
    }

    #[test]
    fn the_guard_is_in_a_pod_whose_gpu_containers_all_have_it() {
        let mounts = json!([
            {"name": "g", "mountPath": "/opt/highwater", "readOnly": true},
            {"name": "g", "mountPath": "/etc/ld.so.preload", "subPath": "ld.so.preload", "readOnly": true}]);
        let container = |name: &str, gpu: bool, mounts: &Value| {
            let limits = if gpu { json!({"nvidia.com/gpu": "1"}) } else { json!({}) };
            json!({"name": name, "resources": {"limits": limits}, "volumeMounts": mounts})
        };
        let pod = |label: bool, volume: bool, containers: &[&Value]| {
            let labels = if label { json!({"highwater.dev/guard": "true"}) } else { json!({}) };
            let driver = if volume { "guard.highwater.dev" } else { "other.example.com" };
            parse(json!({"metadata": {"labels": labels}, "spec": {
                "containers": containers, "volumes": [{"name": "g", "csi": {"driver": driver}}]}}))
            .guard
        };
        let (with, without) = (container("a", true, &mounts), container("b", true, &json!([])));
        let (beside, claimed) = (container("c", false, &json!([])), container("d", false, &mounts));
        assert_eq!(pod(false, false, &[&with]), GuardOptIn::No);
        assert_eq!(pod(true, false, &[&with]), GuardOptIn::Asked, "nothing brought it in");
        assert_eq!(pod(true, true, &[&with, &beside]), GuardOptIn::Volume);
        assert_eq!(pod(false, true, &[&with]), GuardOptIn::Volume, "by its own spec");
        assert_eq!(pod(true, true, &[&with, &without]), GuardOptIn::Asked, "one could do without it");
        assert_eq!(pod(true, true, &[&beside]), GuardOptIn::Asked, "nobody has it");
        assert_eq!(pod(true, true, &[&claimed]), GuardOptIn::Volume, "claimed otherwise");
    }

    #[test]
    fn system_pods_are_known_by_priority_or_class() {
        for spec in [
            json!({"containers": [], "priority": 2_000_001_000}),
            json!({"containers": [], "priorityClassName": "system-node-critical"}),
        ] {
            assert!(parse(json!({"metadata": {}, "spec": spec})).system_priority);
        }
    }

    #[test]
    fn a_static_pod_is_known_to_the_kubelet_by_its_hash_and_no_pod_by_anothers_uid() {
        let mirror = |of: &str| {
            parse(json!({"metadata": {"uid": "api", "annotations": {"kubernetes.io/config.mirror": of}}}))
        };
        let hash = "0123456789abcdef0123456789abcdef";
        assert!(mirror(hash).mirror);
        assert_eq!(mirror(hash).kubelet_uid(), hash);
        for forged in ["8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10", "0123456789ABCDEF0123456789ABCDEF", ""] {
            assert!(mirror(forged).mirror, "it is never restarted");
            assert_eq!(mirror(forged).kubelet_uid(), "api");
        }
    }

    #[test]
    fn protected_namespaces_never_match() {
        let facts = NamespaceFacts::default();
        for namespace in ["kube-system", "highwater-system"] {
            assert!(!selects_namespace(None, namespace, Some(&facts), "highwater-system"));
        }
        assert!(selects_namespace(None, "team", Some(&facts), "highwater-system"));
        assert!(!selects_namespace(None, "team", None, "highwater-system"), "labels are not known yet");
    }

    #[test]
    fn a_namespace_selector_looks_at_labels() {
        let selector = LabelSelector {
            match_labels: Some([("team".into(), "llm".into())].into()),
            ..LabelSelector::default()
        };
        let labelled = NamespaceFacts { labels: [("team".into(), "llm".into())].into(), paused: false };
        assert!(selects_namespace(Some(&selector), "a", Some(&labelled), "r"));
        assert!(!selects_namespace(Some(&selector), "a", Some(&NamespaceFacts::default()), "r"));
    }
}
