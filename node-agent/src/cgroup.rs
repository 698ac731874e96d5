//! From the text of `/proc/PID/cgroup` to the pod and container that the process belongs to.
//!
//! The shapes differ by cgroup version, by the kubelet's cgroup driver, by runtime and by
//! nesting, and are not anchored on `kubepods`, whose name is configurable. What they share: one
//! element of the path carries `pod<uid>`, and the element below it is the container. The
//! *outermost* match counts. Whoever can make cgroups inside a container, such as a nested
//! container runtime, makes them below its own pod's, and so cannot pass for another pod.

use std::sync::Arc;

/// The pod and container of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CgroupOwner {
    /// UID of the pod. For a static pod this is the hash of its manifest (32 hex digits), which
    /// its mirror pod carries in the annotation `kubernetes.io/config.mirror`.
    pub(crate) pod_uid: Arc<str>,
    /// Id of the container (64 hex digits); absent for what runs in the pod but in none of its
    /// containers, such as a runtime's monitor.
    pub(crate) container_id: Option<Arc<str>>,
}

/// The owner named by the text of `/proc/PID/cgroup`, or `None` for a process of no pod.
pub(crate) fn owner(text: &str) -> Option<CgroupOwner> {
    // A line is `hierarchy:controllers:path`; the path may contain colons.
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(owner_of_path)
}

/// Whether the process is in a container that a container of its pod made.
pub(crate) fn is_nested(text: &str) -> bool {
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|path| {
        let mut below = path.split('/').skip_while(|element| split_pod(element).is_none()).skip(1);
        below.by_ref().find(|element| container_id(element).is_some()).is_some()
            && below.any(|element| container_id(element).is_some())
    })
}

/// The UID of the pod whose cgroup has this name.
pub(crate) fn pod_of(name: &str) -> Option<String> {
    split_pod(name).map(|(uid, _)| uid)
}

/// Whether a cgroup below a pod's with this name is a container's.
pub(crate) fn is_container(name: &str) -> bool {
    container_id(name).is_some()
}

fn owner_of_path(path: &str) -> Option<CgroupOwner> {
    let mut elements = path.split('/');
    let (pod_uid, rest) = elements.by_ref().find_map(split_pod)?;
    // containerd under a mismatched cgroup driver: `<pod>.slice:cri-containerd:<container>`.
    let child = rest.rsplit_once(':').map(|(_, id)| id).or_else(|| elements.next());
    Some(CgroupOwner { pod_uid: pod_uid.into(), container_id: child.and_then(container_id).map(Arc::from) })
}

/// Splits a path element such as `kubepods-burstable-pod<uid>.slice` into the pod's UID and what
/// follows it.
fn split_pod(element: &str) -> Option<(String, &str)> {
    element.match_indices("pod").find_map(|(at, prefix)| {
        // `libpod-<64 hex>` is not a pod: the word must begin here, and the UID right after it.
        let (before, rest) = (element.get(..at)?, element.get(at + prefix.len()..)?);
        let begins = before.is_empty() || before.ends_with('-');
        let end = rest.find(|c: char| !is_uid_char(c)).unwrap_or(rest.len());
        let (uid, rest) = rest.split_at(end);
        let ends = rest.is_empty() || rest.starts_with('.') || rest.starts_with(':');
        (begins && ends).then(|| parse_uid(uid)).flatten().map(|uid| (uid, rest))
    })
}

fn is_uid_char(c: char) -> bool {
    is_hex(c) || c == '-' || c == '_'
}

fn is_hex(c: char) -> bool {
    matches!(c, '0'..='9' | 'a'..='f')
}

/// A UUID, in which systemd's names have `_` for `-`, or the 32 hex digits of a static pod.
fn parse_uid(text: &str) -> Option<String> {
    let groups: Vec<_> = text.split(['-', '_']).collect();
    let lengths: Vec<_> = groups.iter().map(|group| group.len()).collect();
    matches!(lengths.as_slice(), [8, 4, 4, 4, 12] | [32]).then(|| groups.join("-"))
}

/// The container's id in the element below the pod: `<id>`, `<runtime>-<id>.scope`, ...
fn container_id(element: &str) -> Option<&str> {
    let name = element.strip_suffix(".scope").unwrap_or(element);
    let (runtime, id) = name.rsplit_once(['-', '_']).unwrap_or(("", name));
    let monitor = runtime.ends_with("conmon");
    (id.len() == 64 && id.chars().all(is_hex) && !monitor).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
    const SYSTEMD_UID: &str = "8f0c1c3e_52f4_4c8e_9a66_6f5b4f2c9d10";
    const OTHER_UID: &str = "00000000-1111-2222-3333-444444444444";
    const STATIC_UID: &str = "0123456789abcdef0123456789abcdef";
    const ID: &str = "4f7a1d0b8c9e2f3a4b5c6d7e8f9012344f7a1d0b8c9e2f3a4b5c6d7e8f901234";
    const INNER_ID: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    /// The text with each name in braces replaced by the constant.
    fn text(pattern: &str) -> String {
        [
            ("{UID}", UID),
            ("{SYSTEMD}", SYSTEMD_UID),
            ("{OTHER}", OTHER_UID),
            ("{STATIC}", STATIC_UID),
            ("{ID}", ID),
            ("{INNER}", INNER_ID),
        ]
        .iter()
        .fold(pattern.to_owned(), |text, (name, value)| text.replace(name, value))
    }

    /// What, text, UID, container.
    #[rustfmt::skip]
    const SHAPES: &[(&str, &str, &str, Option<&str>)] = &[
        ("v1, cgroupfs", "11:memory:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/kubepods/burstable/pod{UID}/{ID}", UID, Some(ID)),
        ("v1, cgroupfs, guaranteed", "4:memory:/kubepods/pod{UID}/{ID}", UID, Some(ID)),
        ("v1, first lines outside", "12:rdma:/\n11:memory:/kubepods/besteffort/pod{UID}/{ID}\n0::/system.slice/containerd.service", UID, Some(ID)),
        ("v1, systemd, docker", "9:memory:/kubepods.slice/kubepods-pod{SYSTEMD}.slice/docker-{ID}.scope", UID, Some(ID)),
        ("v2, cgroupfs", "0::/kubepods/besteffort/pod{UID}/{ID}", UID, Some(ID)),
        ("v2, cgroupfs, CRI-O", "0::/kubepods/besteffort/pod{UID}/crio-{ID}", UID, Some(ID)),
        ("v2, systemd, containerd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("v2, systemd, guaranteed", "0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("v2, systemd, CRI-O", "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-{ID}.scope", UID, Some(ID)),
        ("v2, systemd, CRI-O monitor", "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-conmon-{ID}.scope", UID, None),
        ("v2, systemd, docker", "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/docker-{ID}.scope", UID, Some(ID)),
        ("crun's child", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/crio-{ID}.scope/container", UID, Some(ID)),
        ("systemd inside", "0::/kubepods/burstable/pod{UID}/{ID}/init.scope", UID, Some(ID)),
        ("kata", "0::/kubepods/burstable/pod{UID}/kata_{ID}", UID, Some(ID)),
        ("containerd, mismatched driver", "0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:{ID}", UID, Some(ID)),
        ("kind", "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("kind, from the outer host", "0::/docker/{INNER}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("another cgroup root", "0::/machines/gpu.slice/machines-gpu-kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("docker in docker", "0::/kubepods/burstable/pod{UID}/{ID}/docker/{INNER}", UID, Some(ID)),
        ("docker in docker, systemd", "0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope/system.slice/docker-{INNER}.scope", UID, Some(ID)),
        ("a kubelet in a pod", "0::/kubepods/burstable/pod{UID}/{ID}/kubepods/besteffort/pod{OTHER}/{INNER}", UID, Some(ID)),
        ("static pod", "0::/kubepods/burstable/pod{STATIC}/{ID}", STATIC_UID, Some(ID)),
        ("static pod, systemd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope", STATIC_UID, Some(ID)),
        ("private cgroup namespace", "0::/../../kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", UID, Some(ID)),
        ("private cgroup namespace, cgroupfs", "0::/../../../besteffort/pod{UID}/{ID}", UID, Some(ID)),
        ("in the pod, in no container", "0::/kubepods/burstable/pod{UID}", UID, None),
        ("a child that is no container", "0::/kubepods/burstable/pod{UID}/helpers", UID, None),
        ("removed while in use", "0::/kubepods/burstable/pod{UID}/{ID} (deleted)", UID, None),
    ];

    #[test]
    fn every_known_shape_names_pod_and_container() {
        for &(what, pattern, uid, id) in SHAPES {
            let expected = CgroupOwner { pod_uid: uid.into(), container_id: id.map(Arc::from) };
            assert_eq!(owner(&text(pattern)), Some(expected), "{what}");
        }
    }

    #[test]
    fn a_container_in_a_container_is_nested() {
        for &(what, pattern, ..) in SHAPES {
            let nested = what.starts_with("docker in docker") || what == "a kubelet in a pod";
            assert_eq!(is_nested(&text(pattern)), nested, "{what}");
        }
        assert!(!is_nested("0::/docker/x\n"));
    }

    #[test]
    fn what_is_not_in_a_pod_has_no_owner() {
        for pattern in [
            "",
            "\n",
            "0::/",
            "garbage",
            "0::/init.scope",
            "0::/user.slice/user-1000.slice/session-1.scope",
            "0::/system.slice/docker-{ID}.scope",
            "0::/machine.slice/libpod-{ID}.scope/container",
            "0::/machine.slice/libpod_pod_{ID}.slice/libpod-{ID}.scope",
            "0::/../cri-containerd-{ID}.scope",
            "0::/kubepods.slice/kubepods-burstable.slice",
            "0::/kubepods/pod1234",
            "0::/kubepods/pod{UID}x/{ID}",
            "0::/kubepods/mypod{UID}/{ID}",
            "0::/kubepods/pod{ID}/{ID}",
            "0::/kubepods/podé{UID}/{ID}",
        ] {
            assert_eq!(owner(&text(pattern)), None, "{pattern}");
        }
    }

    #[test]
    fn a_pod_cannot_pass_for_another_by_the_names_of_its_cgroups() {
        let forged = text(
            "0::/kubepods/burstable/pod{UID}/{ID}/kubepods-pod{OTHER}.slice/cri-containerd-{INNER}.scope",
        );
        assert_eq!(owner(&forged).unwrap().pod_uid.as_ref(), UID);
    }
}
