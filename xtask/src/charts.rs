//! The charts: Helm accepts them, and what they render keeps the promises of the security page.
//!
//! Each `charts/highwater/ci/*-values.yaml` is rendered once.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Values that the schema must refuse: a misspelt or misplaced value is never silently ignored.
const REFUSED: [&str; 5] = [
    "agent.sampleIntervalMiliseconds=100",
    "agent.sampleIntervalMilliseconds=5",
    "paused=true",
    "operator.replicas=-1",
    "driver.libraryPath=relative/path",
];

/// One message for each thing that is wrong with the charts.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let Some(helm) = helm() else {
        println!("skipped charts: helm is not installed (set HELM to its path)");
        return Ok(Vec::new());
    };
    let mut problems = Vec::new();
    for chart in ["charts/highwater-crds", "charts/highwater"] {
        if let Err(output) =
            run(root, &helm, &["lint", "--strict", "--quiet", "--kube-version", "1.34.0", chart])?
        {
            problems.push(format!("helm lint {chart}:\n{output}"));
        }
    }
    let mut values: Vec<PathBuf> = fs::read_dir(root.join("charts/highwater/ci"))
        .context("reading charts/highwater/ci")?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    values.sort();
    for file in values {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let rendered = match render(root, &helm, &["--values", &file.to_string_lossy()])? {
            Ok(rendered) => rendered,
            Err(output) => {
                problems.push(format!("helm template with {name}:\n{output}"));
                continue;
            }
        };
        let objects = parse(&rendered).with_context(|| format!("reading what {name} renders"))?;
        let privileged = name.starts_with("privileged");
        problems.extend(
            broken_promises(&objects, privileged).into_iter().map(|broken| format!("{name}: {broken}")),
        );
        problems.extend(unknown_flags(root, &objects).into_iter().map(|flag| format!("{name}: {flag}")));
    }
    for set in REFUSED {
        if render(root, &helm, &["--set", set])?.is_ok() {
            problems.push(format!("--set {set} is accepted"));
        }
    }
    Ok(problems)
}

/// Helm, from $HELM or the search path.
fn helm() -> Option<String> {
    let helm = env::var("HELM").unwrap_or_else(|_| "helm".into());
    Command::new(&helm).arg("version").output().is_ok_and(|output| output.status.success()).then_some(helm)
}

/// What the command printed, or why it failed.
fn run(root: &Path, program: &str, arguments: &[&str]) -> Result<Result<String, String>> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root)
        .output()
        .with_context(|| format!("starting {program}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!("{}{}", text(&output.stdout), text(&output.stderr)))
    })
}

fn render(root: &Path, helm: &str, extra: &[&str]) -> Result<Result<String, String>> {
    let mut arguments = vec![
        "template",
        "highwater",
        "charts/highwater",
        "--namespace",
        "highwater-system",
        "--kube-version",
        "1.34.0",
        "--api-versions",
        "monitoring.coreos.com/v1/PodMonitor",
        "--api-versions",
        "monitoring.coreos.com/v1/PrometheusRule",
    ];
    arguments.extend(extra);
    run(root, helm, &arguments)
}

fn parse(rendered: &str) -> Result<Vec<Value>> {
    rendered
        .split("\n---\n")
        .map(|document| document.trim_start_matches("---\n"))
        .filter(|document| document.lines().any(|line| !line.is_empty() && !line.starts_with('#')))
        .map(|document| serde_saphyr::from_str(document).with_context(|| document.to_owned()))
        .collect()
}

/// What every rendering must hold to.
fn broken_promises(objects: &[Value], privileged: bool) -> Vec<String> {
    let mut broken = Vec::new();
    let accounts: BTreeSet<&str> =
        of_kind(objects, "ServiceAccount").filter_map(|account| text(account, "/metadata/name")).collect();
    for object in objects {
        let kind = text(object, "/kind").unwrap_or("?");
        let name = text(object, "/metadata/name").unwrap_or("?");
        let mut say = |what: &str| broken.push(format!("{kind} {name}: {what}"));
        if text(object, "/metadata/labels/app.kubernetes.io~1part-of") != Some("highwater") {
            say("lacks the standard labels");
        }
        if let Some(pod) = object.pointer("/spec/template/spec") {
            let agent = kind == "DaemonSet";
            for fault in pod_faults(pod, agent, agent && privileged) {
                say(&fault);
            }
            let account = text(pod, "/serviceAccountName").unwrap_or_default();
            if !accounts.is_empty() && !accounts.contains(account) {
                say(&format!("its service account {account} is not rendered"));
            }
        }
        if kind.ends_with("Role") {
            for fault in role_faults(object, name) {
                say(&fault);
            }
        }
    }
    broken
}

/// The capabilities that `agent.evidence` takes, and no other.
fn evidence() -> Value {
    json!({"drop": ["ALL"], "add": ["DAC_READ_SEARCH", "SYS_PTRACE"]})
}

fn pod_faults(pod: &Value, agent: bool, privileged: bool) -> Vec<String> {
    let mut faults = Vec::new();
    if !agent && pod.pointer("/securityContext/runAsNonRoot") != Some(&json!(true)) {
        faults.push("may run as root".to_owned());
    }
    if !agent && (pod.get("hostPID").is_some() || pod.get("volumes").is_some()) {
        faults.push("reaches into the host".to_owned());
    }
    let tolerates = pod.pointer("/tolerations").and_then(Value::as_array).into_iter().flatten();
    if !tolerates
        .into_iter()
        .any(|toleration| text(toleration, "/key") == Some("highwater.dev/memory-pressure"))
    {
        faults.push("does not tolerate Highwater's own taint".to_owned());
    }
    for container in pod.pointer("/containers").and_then(Value::as_array).into_iter().flatten() {
        let has = |pointer: &str, value: Value| container.pointer(pointer) == Some(&value);
        if !has("/securityContext/readOnlyRootFilesystem", json!(true)) {
            faults.push("may write to its root file system".to_owned());
        }
        let capable = !has("/securityContext/capabilities", json!({"drop": ["ALL"]}))
            && (!agent || !has("/securityContext/capabilities", evidence()));
        if !privileged
            && (capable
                || !has("/securityContext/allowPrivilegeEscalation", json!(false))
                || container.pointer("/securityContext/privileged").is_some())
        {
            faults.push("has more privilege than it needs".to_owned());
        }
        if container.pointer("/resources/requests/cpu").is_none()
            || container.pointer("/resources/limits/memory").is_none()
        {
            faults.push("has no CPU request or no memory limit".to_owned());
        }
    }
    faults
}

fn role_faults(role: &Value, name: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for rule in role.pointer("/rules").and_then(Value::as_array).into_iter().flatten() {
        let words = |key: &str| -> BTreeSet<&str> {
            rule.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
        };
        let (resources, verbs) = (words("resources"), words("verbs"));
        if resources.contains("*") || verbs.contains("*") || words("apiGroups").contains("*") {
            faults.push(format!("grants a wildcard: {rule}"));
        }
        if ["secrets", "pods/exec", "pods/attach"].iter().any(|never| resources.contains(never)) {
            faults.push(format!("grants what nothing needs: {rule}"));
        }
        let writes = verbs.iter().any(|verb| !["get", "list", "watch"].contains(verb));
        if name.ends_with("-agent")
            && writes
            && !resources.iter().all(|r| r.starts_with("gpumemory") || *r == "events")
        {
            faults.push(format!("lets an agent write more than its own objects: {rule}"));
        }
    }
    faults
}

/// Flags that the chart passes and the programs do not have.
fn unknown_flags(root: &Path, objects: &[Value]) -> Vec<String> {
    let mut unknown = Vec::new();
    for (kind, sources) in
        [("DaemonSet", "node-agent/src"), ("Deployment", "operator/src"), ("Job", "operator/src")]
    {
        let code = sources_below(&root.join(sources));
        for object in of_kind(objects, kind) {
            let containers = object.pointer("/spec/template/spec/containers").and_then(Value::as_array);
            for argument in containers
                .into_iter()
                .flatten()
                .filter_map(|container| container.get("args").and_then(Value::as_array))
                .flatten()
                .filter_map(Value::as_str)
                .filter_map(|argument| argument.strip_prefix("--"))
            {
                let flag = argument.split('=').next().unwrap_or_default();
                // clap derives the flag from the name of the field.
                if !code.contains(&format!("{}:", flag.replace('-', "_")))
                    && !code.contains(&format!("\"{flag}\""))
                {
                    unknown.push(format!("{sources} knows no flag --{flag}"));
                }
            }
        }
    }
    unknown
}

/// The text of every source file below a folder.
fn sources_below(folder: &Path) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.push_str(&sources_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(&path).unwrap_or_default());
        }
    }
    all
}

fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| text(object, "/kind") == Some(kind))
}

fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_that_keeps_capabilities_is_found() {
        let pod = json!({"securityContext": {"runAsNonRoot": true},
            "tolerations": [{"key": "highwater.dev/memory-pressure"}],
            "containers": [{"securityContext": {"readOnlyRootFilesystem": true},
                "resources": {"requests": {"cpu": "1m"}, "limits": {"memory": "1Mi"}}}]});
        assert_eq!(pod_faults(&pod, false, false), ["has more privilege than it needs"]);
        let mut agent = pod.clone();
        let context = &mut agent["containers"][0]["securityContext"];
        context["allowPrivilegeEscalation"] = json!(false);
        context["capabilities"] = evidence();
        assert!(pod_faults(&agent, true, false).is_empty());
        assert_eq!(pod_faults(&agent, false, false), ["has more privilege than it needs"]);
    }

    #[test]
    fn an_agent_that_may_evict_is_found() {
        let role =
            json!({"rules": [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]});
        assert_eq!(role_faults(&role, "highwater-agent").len(), 1);
        assert_eq!(role_faults(&role, "highwater-operator"), Vec::<String>::new());
    }
}
