//! What a request must be. Pure: whatever comes, it ends as an answer.

use std::path::Path;

use kubelet_api::csi::{
    EPHEMERAL, NodePublishVolumeRequest, POD_NAME, POD_NAMESPACE, POD_UID, volume_capability::AccessType,
};

use super::{LIBRARY, MOUNT, MOUNTED_AT, Refusal};

/// Attribute with further libraries to preload: those of the image, whose own file is hidden.
const PRELOAD_ATTRIBUTE: &str = "preload";
/// Most further libraries.
const MOST_LIBRARIES: usize = 16;
/// Longest attribute, in bytes.
const LONGEST_ATTRIBUTE: usize = 4096;
/// The kubelet's directories between that of a pod and that of a volume.
const VOLUMES: [&str; 2] = ["volumes", "kubernetes.io~csi"];

/// Where a volume is to appear, below the kubelet's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// UID of the pod.
    pub(crate) pod: String,
    /// Name of the volume.
    pub(crate) volume: String,
}

impl Target {
    /// The directories down to the volume's own, in which [`MOUNT`] is to appear.
    pub(super) fn directories(&self) -> [&str; 5] {
        let [volumes, driver] = VOLUMES;
        ["pods", &self.pod, volumes, driver, &self.volume]
    }
}

/// A volume to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Publish {
    /// Where.
    pub(crate) target: Target,
    /// Namespace and name of the pod.
    pub(crate) pod: String,
    /// Libraries to preload after the guard.
    pub(crate) preload: Vec<String>,
}

/// Reads a request to publish.
pub(crate) fn validate(request: &NodePublishVolumeRequest, root: &Path) -> Result<Publish, Refusal> {
    let attribute = |name: &str| request.volume_context.get(name).map_or("", String::as_str);
    if request.volume_id.is_empty() {
        return Err(Refusal::invalid("the volume has no identifier"));
    }
    if attribute(EPHEMERAL) != "true" {
        return Err(Refusal::invalid("the guard's volume is inline: declare it in the pod, not as a claim"));
    }
    if !request.readonly {
        return Err(Refusal::invalid(
            "the guard's volume must be read-only: set readOnly in the pod's volume",
        ));
    }
    let capability = request.volume_capability.as_ref();
    if !matches!(capability.and_then(|how| how.access_type.as_ref()), Some(AccessType::Mount(_))) {
        return Err(Refusal::invalid("the guard's volume is a file system, not a block device"));
    }
    let (uid, name, namespace) = (attribute(POD_UID), attribute(POD_NAME), attribute(POD_NAMESPACE));
    if !is_name(uid) || !is_name(name) || !is_name(namespace) {
        return Err(Refusal::invalid(
            "the kubelet does not say whose volume it is: set podInfoOnMount in the CSIDriver",
        ));
    }
    let target = target(&request.target_path, root)?;
    if target.pod != uid {
        return Err(Refusal::invalid("the target path is another pod's"));
    }
    let preload = preload(attribute(PRELOAD_ATTRIBUTE))?;
    Ok(Publish { target, pod: format!("{namespace}/{name}"), preload })
}

/// Reads a target path: exactly the kubelet's way to write that of a volume.
pub(crate) fn target(path: &str, root: &Path) -> Result<Target, Refusal> {
    let outside = || {
        let why = format!("the target path {path:?} is not that of a volume below {}", root.display());
        Refusal::invalid(why)
    };
    let below = root.to_str().and_then(|root| path.strip_prefix(root.trim_end_matches('/')));
    let mut parts = below.and_then(|below| below.strip_prefix("/pods/")).ok_or_else(outside)?.split('/');
    let mut next = || parts.next().unwrap_or("");
    let (pod, volumes, driver, volume, mount) = (next(), next(), next(), next(), next());
    let known = [volumes, driver] == VOLUMES && mount == MOUNT && parts.next().is_none();
    if !known || !is_name(pod) || !is_name(volume) {
        return Err(outside());
    }
    Ok(Target { pod: pod.to_owned(), volume: volume.to_owned() })
}

/// Whether the text can be the name of an object, and so of a file: no separator, no way up.
fn is_name(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.';
    (1..=253).contains(&text.len())
        && text.bytes().all(plain)
        && !text.starts_with('.')
        && !text.contains("..")
}

/// Reads the further libraries, separated as in the loader's own file.
fn preload(text: &str) -> Result<Vec<String>, Refusal> {
    if text.len() > LONGEST_ATTRIBUTE {
        return Err(Refusal::invalid(format!("more than {LONGEST_ATTRIBUTE} bytes of libraries to preload")));
    }
    let mut libraries = Vec::new();
    for library in text.split([':', ' ', '\t', '\n', '\r']).filter(|library| !library.is_empty()) {
        // The loader takes # for the start of a comment, and would skip what follows.
        let plain = library.bytes().all(|c| c.is_ascii_graphic() && c != b'#');
        if !plain || !library.starts_with('/') || library.split('/').any(|part| part == "..") {
            return Err(Refusal::invalid(format!("{library:?} is not a full path of a library to preload")));
        }
        let guard = library.strip_prefix(MOUNTED_AT).and_then(|rest| rest.strip_prefix('/')) == Some(LIBRARY);
        if !guard && !libraries.iter().any(|known| known == library) {
            libraries.push(library.to_owned());
        }
    }
    if libraries.len() > MOST_LIBRARIES {
        return Err(Refusal::invalid(format!("more than {MOST_LIBRARIES} libraries to preload")));
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use kubelet_api::csi::{
        VolumeCapability,
        volume_capability::{BlockVolume, MountVolume},
    };
    use proptest::{prelude::*, strategy::ValueTree as _};

    use super::*;

    const ROOT: &str = "/var/lib/kubelet";
    const UID: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5b";

    fn path(uid: &str, volume: &str) -> String {
        format!("{ROOT}/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount")
    }

    fn capability(access_type: AccessType) -> VolumeCapability {
        VolumeCapability { access_type: Some(access_type), access_mode: None }
    }

    fn request() -> NodePublishVolumeRequest {
        let context = [(EPHEMERAL, "true"), (POD_UID, UID), (POD_NAME, "server-0"), (POD_NAMESPACE, "llm")];
        NodePublishVolumeRequest {
            volume_id: "csi-0123".into(),
            target_path: path(UID, "highwater-guard"),
            readonly: true,
            volume_capability: Some(capability(AccessType::Mount(MountVolume::default()))),
            volume_context: context.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            ..NodePublishVolumeRequest::default()
        }
    }

    fn validated(request: &NodePublishVolumeRequest) -> Result<Publish, Refusal> {
        validate(request, Path::new(ROOT))
    }

    #[test]
    fn a_request_of_the_kubelet_is_read() {
        let publish = validated(&request()).unwrap();
        assert_eq!(publish.target, Target { pod: UID.into(), volume: "highwater-guard".into() });
        assert_eq!((publish.pod.as_str(), publish.preload), ("llm/server-0", vec![]));
        assert_eq!(validate(&request(), Path::new("/var/lib/kubelet/")).unwrap().pod, "llm/server-0");
    }

    #[test]
    fn what_is_missing_is_named() {
        type Change = fn(&mut NodePublishVolumeRequest);
        let changes: [(Change, &str); 9] = [
            (|r| r.readonly = false, "readOnly"),
            (|r| r.volume_id.clear(), "identifier"),
            (|r| drop(r.volume_context.remove(EPHEMERAL)), "inline"),
            (|r| drop(r.volume_context.insert(EPHEMERAL.into(), "false".into())), "inline"),
            (|r| drop(r.volume_context.remove(POD_UID)), "podInfoOnMount"),
            (|r| drop(r.volume_context.insert(POD_NAME.into(), String::new())), "podInfoOnMount"),
            (|r| r.volume_capability = None, "file system"),
            (|r| r.volume_capability = Some(capability(AccessType::Block(BlockVolume {}))), "file system"),
            (|r| drop(r.volume_context.insert(POD_UID.into(), "another".into())), "another pod"),
        ];
        for (change, word) in changes {
            let mut other = request();
            change(&mut other);
            let refusal = validated(&other).unwrap_err();
            assert!(refusal.message.contains(word), "{word}: {refusal}");
        }
    }

    #[test]
    fn only_the_path_of_a_volume_is_a_target() {
        for wrong in [
            String::new(),
            "/".into(),
            path("..", "v"),
            path(".", "v"),
            path(UID, ".."),
            path(UID, "a/../b"),
            path(UID, ""),
            path("", "v"),
            path(UID, "a\0b"),
            format!("{}/", path(UID, "v")),
            format!("{}/..", path(UID, "v")),
            path(UID, "v").replace("/mount", "/vol_data.json"),
            path(UID, "v").replace("~csi", "~empty-dir"),
            path(UID, "v").replace("/pods/", "/pods//"),
            path(UID, "v").replace("/var/lib/kubelet", "/var/lib/kubelet2"),
            path(UID, "v").replace("/var/lib/kubelet", "/etc"),
            path(UID, "v").trim_start_matches('/').into(),
        ] {
            assert!(target(&wrong, Path::new(ROOT)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn further_libraries_are_full_paths_once_each() {
        let guard = "/opt/highwater/libhighwater-guard.so";
        let read = preload(&format!(" /a/b.so:{guard}\n/c.so\t/a/b.so\r\n")).unwrap();
        assert_eq!(read, ["/a/b.so", "/c.so"]);
        for wrong in ["b.so", "/a/../b.so", "/a#b.so", "/a\u{e9}.so", "/a\0.so"] {
            assert!(preload(wrong).is_err(), "{wrong}");
        }
        let many = (0..=MOST_LIBRARIES).map(|n| format!("/{n}.so")).collect::<Vec<_>>().join(":");
        assert!(preload(&many).is_err());
        assert!(preload(&"/a".repeat(LONGEST_ATTRIBUTE)).is_err());
    }

    fn any_text() -> impl Strategy<Value = String> {
        prop_oneof![
            Just(path(UID, "highwater-guard")),
            Just(UID.to_owned()),
            Just("true".to_owned()),
            "[a-z./~:# \n-]{0,40}",
            any::<String>(),
            (any::<String>(), 0..80_usize).prop_map(|(part, at)| {
                let mut text = path(UID, "v");
                text.insert_str(at.min(text.len()), &part);
                text
            }),
        ]
    }

    /// A part of a path, or what somebody would rather have there.
    fn any_part() -> impl Strategy<Value = String> {
        prop_oneof!["[a-z0-9.-]{0,4}", "[a-z./~\\x00-]{0,12}", any_text()]
    }

    fn any_request() -> impl Strategy<Value = NodePublishVolumeRequest> {
        // Most are as they should be: what comes after them is to be reached.
        let names = [EPHEMERAL, POD_UID, POD_NAME, POD_NAMESPACE, PRELOAD_ATTRIBUTE];
        let attributes = names.map(|_| proptest::option::weighted(0.2, any_text()));
        // A path that goes with whatever UID is given, or any.
        let pod = proptest::option::of((any_part(), any_part()));
        (any_text(), any_text(), any::<bool>(), attributes, pod).prop_map(
            move |(id, target_path, readonly, values, pod)| {
                let mut changed =
                    NodePublishVolumeRequest { volume_id: id, target_path, readonly, ..request() };
                for (name, value) in names.into_iter().zip(values) {
                    value.map(|value| changed.volume_context.insert(name.to_owned(), value));
                }
                if let Some((uid, volume)) = pod {
                    changed.target_path = path(&uid, &volume);
                    changed.volume_context.insert(POD_UID.to_owned(), uid);
                }
                changed
            },
        )
    }

    #[test]
    fn many_of_any_requests_are_refused_and_many_are_not() {
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let any = any_request();
        let accepted = (0..2000).filter(|_| {
            let request = any.new_tree(&mut runner).unwrap().current();
            validated(&request).is_ok()
        });
        let accepted = accepted.count();
        assert!((20..1500).contains(&accepted), "{accepted} of 2000 are accepted");
    }

    proptest! {
        /// Whatever is accepted lies where it should, in the pod that asked.
        #[test]
        fn any_request_is_refused_or_stays_in_its_pod(request in any_request()) {
            // What is to be taken away is told by its path alone.
            if let Ok(target) = target(&request.target_path, Path::new(ROOT)) {
                prop_assert_eq!(path(&target.pod, &target.volume), request.target_path.as_str());
                for part in target.directories() {
                    prop_assert!(!part.is_empty() && !part.contains(['/', '\0']) && !part.starts_with('.'));
                }
            }
            if let Ok(publish) = validated(&request) {
                prop_assert_eq!(&publish.target.pod, &request.volume_context[POD_UID]);
                prop_assert_eq!(path(&publish.target.pod, &publish.target.volume), request.target_path);
                for library in publish.preload {
                    prop_assert!(library.starts_with('/') && !library.contains(char::is_whitespace));
                }
            }
        }
    }
}
