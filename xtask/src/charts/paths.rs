//! The kubelet's directory: all parts look for it in one place, and where it is not they do not start.

use serde_json::Value;

use super::{GUARD_DRIVER, Part, arguments, of_kind, text};

/// Where the kubelet keeps its directory unless told otherwise.
const USUAL: &str = "/var/lib/kubelet";

/// A folder of the host in a container.
#[derive(Debug)]
struct Folder<'a> {
    on_host: &'a str,
    mounted_at: &'a str,
    /// Whether the pod waits where the host does not have it.
    must_be_there: bool,
}

/// What is wrong with where agent and keeper look for the kubelet.
pub(super) fn faults(objects: &[Value]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut roots = Vec::new();
    for daemon_set in of_kind(objects, "DaemonSet") {
        let part = Part::of(daemon_set);
        let Some(root) = arguments(daemon_set).find_map(|a| a.strip_prefix("--kubelet-root=")) else {
            continue;
        };
        let folders = folders(daemon_set);
        let mut needs = |below: &str, must_be_there: bool| {
            let path = format!("{root}/{below}");
            let found = folders.iter().find(|folder| folder.mounted_at == path);
            match found {
                None => faults.push(format!("{part:?} does not have {path}")),
                Some(folder) if folder.on_host != path => {
                    faults.push(format!("{part:?} has {} of the host at {path}", folder.on_host));
                }
                Some(folder) if must_be_there && !folder.must_be_there => {
                    faults.push(format!("{part:?} starts where there is no {path}, and nobody looks there"));
                }
                Some(_) => {}
            }
        };
        if part == Part::Agent {
            needs("pod-resources", true);
            needs("pods", true);
        } else if arguments(daemon_set).any(|a| a.starts_with("--guard-library=")) {
            needs("plugins_registry", true);
            needs("pods", true);
            // The plugin's own folder, which the keeper makes.
            needs(&format!("plugins/{GUARD_DRIVER}"), false);
        }
        roots.push(root);
    }
    roots.dedup();
    if let [root] = roots[..] {
        faults.extend(strays(objects, root));
    } else if roots.len() > 1 {
        faults.push(format!("agent and keeper look for the kubelet in different places: {roots:?}"));
    }
    faults
}

/// Objects that name the usual directory although the kubelet has another.
fn strays(objects: &[Value], root: &str) -> Vec<String> {
    let looks = |object: &&Value| root != USUAL && object.to_string().contains(USUAL);
    let name = |object: &Value| {
        let field = |pointer: &str| text(object, pointer).unwrap_or("?").to_owned();
        format!("{} {} looks into {USUAL}", field("/kind"), field("/metadata/name"))
    };
    objects.iter().filter(looks).map(name).collect()
}

/// The folders of the host that the first container has.
fn folders(daemon_set: &Value) -> Vec<Folder<'_>> {
    let list = |pointer: &str| daemon_set.pointer(pointer).and_then(Value::as_array).into_iter().flatten();
    let volumes: Vec<&Value> = list("/spec/template/spec/volumes").collect();
    list("/spec/template/spec/containers/0/volumeMounts")
        .filter_map(|mount| {
            let volume = volumes.iter().find(|volume| volume.get("name") == mount.get("name"))?;
            Some(Folder {
                on_host: text(volume, "/hostPath/path")?,
                mounted_at: text(mount, "/mountPath")?,
                must_be_there: text(volume, "/hostPath/type") == Some("Directory"),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::{helm, kinds, parse, render};
    use super::*;

    const ELSEWHERE: &str = "/var/lib/k0s/kubelet";

    fn keeper(root: &str, on_host: &str, kind: &str) -> Value {
        let names = ["plugins_registry", "pods", "plugins/guard.highwater.dev"];
        let mounts = names.map(|name| json!({"name": name, "mountPath": format!("{root}/{name}")}));
        let volumes = names.map(
            |name| json!({"name": name, "hostPath": {"path": format!("{on_host}/{name}"), "type": kind}}),
        );
        json!({
            "kind": "DaemonSet",
            "metadata": {"name": "keeper", "labels": {"app.kubernetes.io/component": "keeper"}},
            "spec": {"template": {"spec": {
                "containers": [{
                    "args": [format!("--kubelet-root={root}"), "--guard-library=/g.so"],
                    "volumeMounts": mounts,
                }],
                "volumes": volumes,
            }}},
        })
    }

    #[test]
    fn b07_a_part_that_looks_for_the_kubelet_in_another_place_is_found() {
        let right = keeper(ELSEWHERE, ELSEWHERE, "Directory");
        assert_eq!(faults(std::slice::from_ref(&right)), Vec::<String>::new());
        let usual = keeper(USUAL, USUAL, "Directory");
        assert_eq!(faults(std::slice::from_ref(&usual)), Vec::<String>::new());
        // Mounted from elsewhere; made where nobody looks; not of one mind; left behind by one object.
        assert_eq!(faults(&[keeper(ELSEWHERE, "/kubelet", "Directory")]).len(), 3);
        assert_eq!(faults(&[keeper(ELSEWHERE, ELSEWHERE, "DirectoryOrCreate")]).len(), 2);
        assert_eq!(faults(&[right.clone(), usual]).len(), 1);
        let policy = json!({"kind": "Policy", "metadata": {"name": "p"}, "spec": {"path": USUAL}});
        assert_eq!(faults(&[right, policy]), ["Policy p looks into /var/lib/kubelet"]);
    }

    #[test]
    fn b07_with_the_kubelet_elsewhere_every_part_looks_there() {
        let Some(helm) = helm() else { return };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for values in ["kubelet-elsewhere", "default"] {
            let file = format!("charts/highwater/ci/{values}-values.yaml");
            let rendered = render(root, &helm, &kinds(Some("v1")), &["--values", &file]).unwrap().unwrap();
            let objects = parse(&rendered).unwrap();
            assert_eq!(faults(&objects), Vec::<String>::new(), "{values}");
            let moved = rendered.contains(&format!("{ELSEWHERE}/plugins/guard.highwater.dev"));
            assert_eq!(moved, values == "kubelet-elsewhere");
        }
    }
}
