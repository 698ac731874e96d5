//! The charts: Helm accepts them, and what they render keeps the promises of the security page.
//!
//! Each `charts/highwater/ci/*-values.yaml` is rendered once, and so are the values of the first chart.

mod paths;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use highwater_crds::names::{GUARD_DRIVER, GUARD_LABEL, GUARD_MOUNT, GUARD_PRELOAD, GUARD_VOLUME};
use serde_json::{Value, json};

/// Values that the schema must refuse: a misspelt or misplaced value is never silently ignored.
const REFUSED: [&str; 8] = [
    "agent.sampleIntervalMiliseconds=100",
    "agent.sampleIntervalMilliseconds=5",
    "paused=true",
    "operator.replicas=-1",
    "driver.libraryPath=relative/path",
    "keeper.stateDir=run/keeper",
    "keeper.nodeSelector.gpu=true",
    "guard.enable=false",
];

/// Kinds that a cluster may lack, and by which the charts look for them.
const PROMETHEUS: [&str; 2] =
    ["monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule"];

/// The versions of the kind that injects the guard: of 1.36 and later, and as it can be switched on
/// before.
const INJECTION: [&str; 2] = ["v1", "v1beta1"];

/// With what every template begins: values of a former chart lack some of today's.
const SETTLE: &str = "{{- include \"highwater.settle\" . -}}\n";

/// The values of the first chart.
const FORMER_VALUES: &str = "xtask/tests/former-values.yaml";

/// Namespace that the charts are rendered for.
const NAMESPACE: &str = "highwater-system";

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
        let served = kinds(Some(INJECTION[0]));
        let rendered = match render(root, &helm, &served, &["--values", &file.to_string_lossy()])? {
            Ok(rendered) => rendered,
            Err(output) => {
                problems.push(format!("helm template with {name}:\n{output}"));
                continue;
            }
        };
        let objects = parse(&rendered).with_context(|| format!("reading what {name} renders"))?;
        let privileged = name.starts_with("privileged");
        problems.extend(
            broken_promises(&objects, privileged)
                .into_iter()
                .chain(guard_faults(&objects))
                .chain(paths::faults(&objects))
                .map(|broken| format!("{name}: {broken}")),
        );
        problems.extend(unknown_flags(root, &objects).into_iter().map(|flag| format!("{name}: {flag}")));
    }
    for set in REFUSED {
        if render(root, &helm, &kinds(None), &["--set", set])?.is_ok() {
            problems.push(format!("--set {set} is accepted"));
        }
    }
    for version in [None, Some(INJECTION[0]), Some(INJECTION[1])] {
        problems.extend(injection_faults(root, &helm, version)?);
    }
    problems.extend(former_faults(root, &helm)?);
    problems.extend(unsettled(&root.join("charts/highwater/templates"))?);
    Ok(problems)
}

/// What is wrong where an upgrade reuses the values of the first chart. `helm upgrade --reuse-values`
/// puts them in the place of the chart's own; they must come to the same as today's defaults.
fn former_faults(root: &Path, helm: &str) -> Result<Vec<String>> {
    let folder = tempfile::tempdir().context("making a temporary folder")?;
    let chart = folder.path().join("highwater");
    copy(&root.join("charts/highwater"), &chart)?;
    fs::copy(root.join(FORMER_VALUES), chart.join("values.yaml")).context("copying the former values")?;
    let served = kinds(Some(INJECTION[0]));
    let today = render(root, helm, &served, &[])?;
    Ok(match (render_chart(root, helm, &chart.to_string_lossy(), &served, &[])?, today) {
        (Err(output), _) => vec![format!("helm template with the values of the first chart:\n{output}")],
        (Ok(former), Ok(today)) => difference(&former, &today)
            .map(|line| format!("the values of the first chart come to something else than today's: {line}"))
            .into_iter()
            .collect(),
        // Said already.
        (Ok(_), Err(_)) => Vec::new(),
    })
}

/// The first line in which two texts differ.
fn difference(one: &str, other: &str) -> Option<String> {
    let mut lines = one.lines().zip(other.lines());
    let differing = lines.find(|(one, other)| one != other);
    let cut = (one.lines().count() != other.lines().count()).then(|| "one has more lines".to_owned());
    differing.map(|(one, other)| format!("{one:?} and {other:?}")).or(cut)
}

/// Copies a folder.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else {
            fs::copy(&path, to.join(name)).with_context(|| format!("copying {}", path.display()))?;
        }
    }
    Ok(())
}

/// Templates that read values before what these may lack is put into them.
fn unsettled(templates: &Path) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for entry in fs::read_dir(templates).context("reading the templates")? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !name.starts_with('_') && !fs::read_to_string(&path)?.starts_with(SETTLE) {
            faults.push(format!("templates/{name} does not begin with {}", SETTLE.trim_end()));
        }
    }
    Ok(faults)
}

/// What is wrong where the cluster serves this version of the injecting kind, or none.
fn injection_faults(root: &Path, helm: &str, version: Option<&str>) -> Result<Vec<String>> {
    let served = version.unwrap_or("no version");
    let rendered = match render(root, helm, &kinds(version), &[])? {
        Ok(rendered) => rendered,
        Err(output) => return Ok(vec![format!("helm template with {served} of injection:\n{output}")]),
    };
    let objects = parse(&rendered)?;
    let wanted = version.map(|version| format!("admissionregistration.k8s.io/{version}"));
    let mut faults = Vec::new();
    for kind in ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"] {
        let found: Vec<&str> =
            of_kind(&objects, kind).filter_map(|object| text(object, "/apiVersion")).collect();
        if found != wanted.as_deref().into_iter().collect::<Vec<_>>() {
            faults.push(format!("where {served} of injection is served, {kind} is rendered as {found:?}"));
        }
    }
    Ok(faults)
}

/// The optional kinds of a cluster that injects by this version, or does not.
fn kinds(injection: Option<&str>) -> Vec<String> {
    let injection =
        injection.map(|version| format!("admissionregistration.k8s.io/{version}/MutatingAdmissionPolicy"));
    PROMETHEUS.iter().map(|kind| (*kind).to_owned()).chain(injection).collect()
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

fn render(root: &Path, helm: &str, served: &[String], extra: &[&str]) -> Result<Result<String, String>> {
    render_chart(root, helm, "charts/highwater", served, extra)
}

fn render_chart(
    root: &Path,
    helm: &str,
    chart: &str,
    served: &[String],
    extra: &[&str],
) -> Result<Result<String, String>> {
    let mut arguments =
        vec!["template", "highwater", chart, "--namespace", NAMESPACE, "--kube-version", "1.34.0"];
    arguments.extend(served.iter().flat_map(|kind| ["--api-versions", kind.as_str()]));
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
            let part = Part::of(object);
            for fault in pod_faults(pod, part, privileged && part != Part::Other) {
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

/// Who a pod is, as far as it matters for what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Agent,
    Keeper,
    Other,
}

impl Part {
    fn of(object: &Value) -> Self {
        match text(object, "/metadata/labels/app.kubernetes.io~1component") {
            Some("agent") => Self::Agent,
            Some("keeper") => Self::Keeper,
            _ => Self::Other,
        }
    }
}

/// The capabilities that `agent.evidence` takes, and no other.
fn evidence() -> Value {
    json!({"drop": ["ALL"], "add": ["DAC_READ_SEARCH", "SYS_PTRACE"]})
}

/// What the agent may have: what `agent.evidence` takes, what `agent.restartInPlace` takes, or both.
fn of_agent(capabilities: &Value) -> bool {
    let both = json!({"drop": ["ALL"], "add": ["DAC_READ_SEARCH", "SYS_PTRACE", "KILL"]});
    [evidence(), both, json!({"drop": ["ALL"], "add": ["KILL"]})].contains(capabilities)
}

/// The capability that `keeper.park` takes, along with the host's processes.
fn reach() -> Value {
    json!({"drop": ["ALL"], "add": ["SYS_PTRACE"]})
}

fn pod_faults(pod: &Value, part: Part, privileged: bool) -> Vec<String> {
    let mut faults = Vec::new();
    let reaches = |container: &Value| container.pointer("/securityContext/capabilities") == Some(&reach());
    let containers = || pod.pointer("/containers").and_then(Value::as_array).into_iter().flatten();
    let parks = part == Part::Keeper && (privileged || containers().all(reaches));
    if part == Part::Other && pod.pointer("/securityContext/runAsNonRoot") != Some(&json!(true)) {
        faults.push("may run as root".to_owned());
    }
    if part != Part::Agent && !parks && pod.get("hostPID").is_some() {
        faults.push("sees the processes of the host".to_owned());
    }
    if parks && !privileged && pod.get("hostPID").is_none() {
        faults.push("may reach into processes that it does not see".to_owned());
    }
    if part == Part::Other && pod.get("volumes").is_some() {
        faults.push("reaches into the host".to_owned());
    }
    if part == Part::Keeper && pod.get("automountServiceAccountToken") != Some(&json!(false)) {
        faults.push("has a token for the API server".to_owned());
    }
    let tolerates = pod.pointer("/tolerations").and_then(Value::as_array).into_iter().flatten();
    if !tolerates
        .into_iter()
        .any(|toleration| text(toleration, "/key") == Some("highwater.dev/memory-pressure"))
    {
        faults.push("does not tolerate Highwater's own taint".to_owned());
    }
    for container in containers() {
        let has = |pointer: &str, value: Value| container.pointer(pointer) == Some(&value);
        if !has("/securityContext/readOnlyRootFilesystem", json!(true)) {
            faults.push("may write to its root file system".to_owned());
        }
        let allowed =
            part == Part::Agent && container.pointer("/securityContext/capabilities").is_some_and(of_agent);
        let capable = !(parks || allowed || has("/securityContext/capabilities", json!({"drop": ["ALL"]})));
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

/// What is wrong between agent, keeper and guard.
fn guard_faults(objects: &[Value]) -> Vec<String> {
    let mut faults = Vec::new();
    let part = |part: Part| of_kind(objects, "DaemonSet").find(|object| Part::of(object) == part);
    let (agent, keeper) = (part(Part::Agent), part(Part::Keeper));
    let socket = agent.into_iter().flat_map(arguments).find_map(|a| a.strip_prefix("--keeper-socket="));
    let shared = |folder: &str, daemon_set: &Value| {
        host_paths(daemon_set).any(|path| path == folder) && mounts(daemon_set).any(|path| path == folder)
    };
    match (keeper, socket.and_then(|socket| socket.rsplit_once('/'))) {
        (None, None) => {}
        (Some(keeper), Some((folder, _))) => {
            if ![agent, Some(keeper)].into_iter().flatten().all(|daemon_set| shared(folder, daemon_set)) {
                faults.push(format!("agent and keeper do not both have the folder {folder}"));
            }
            let strategy = |pointer: &str| keeper.pointer(pointer).cloned().unwrap_or_default();
            if strategy("/spec/updateStrategy/type") == "RollingUpdate"
                && (strategy("/spec/updateStrategy/rollingUpdate/maxSurge") != 1
                    || strategy("/spec/updateStrategy/rollingUpdate/maxUnavailable") != 0)
            {
                faults.push("an upgrade ends the keeper before another has what it holds".to_owned());
            }
            faults.extend(grace_fault(keeper));
        }
        (keeper, socket) => faults.push(format!(
            "the agent's --keeper-socket is {socket:?}, and a keeper is {}there",
            if keeper.is_some() { "" } else { "not " },
        )),
    }
    let serves = keeper.is_some_and(|keeper| arguments(keeper).any(|a| a.starts_with("--guard-library=")));
    let drivers: Vec<&Value> = of_kind(objects, "CSIDriver").collect();
    if drivers.len() != usize::from(serves) {
        faults.push(format!("{} CSIDrivers, and the keeper serves volumes: {serves}", drivers.len()));
    }
    for driver in drivers {
        let spec = driver.pointer("/spec").cloned().unwrap_or_default();
        let has = |field: &str, value: Value| spec.get(field) == Some(&value);
        if text(driver, "/metadata/name") != Some(GUARD_DRIVER)
            || !has("podInfoOnMount", json!(true))
            || !has("attachRequired", json!(false))
            || !has("volumeLifecycleModes", json!(["Ephemeral"]))
            || !has("fsGroupPolicy", json!("None"))
        {
            faults.push(format!("not the driver that the keeper serves: {driver}"));
        }
    }
    faults.extend(admission_faults(objects, serves));
    faults
}

/// Seconds of the keeper's grace period that its end leaves over: to close what it holds, and to go.
const KEEPERS_MARGIN: u64 = 10;

/// Why the kubelet may kill the keeper in the middle of its end.
fn grace_fault(keeper: &Value) -> Option<String> {
    let grace = keeper.pointer("/spec/template/spec/terminationGracePeriodSeconds").and_then(Value::as_u64);
    let lasts = arguments(keeper).filter_map(|argument| argument.strip_prefix("--end-seconds="));
    // The last of them counts.
    let lasts = lasts.last().and_then(|seconds| seconds.parse::<u64>().ok());
    let fits = grace.zip(lasts).is_some_and(|(grace, lasts)| lasts.saturating_add(KEEPERS_MARGIN) == grace);
    (!fits).then(|| {
        format!(
            "the keeper's end takes {lasts:?} s, and not all but {KEEPERS_MARGIN} s of its grace period of {grace:?} s"
        )
    })
}

/// What is wrong with the policies about pods.
fn admission_faults(objects: &[Value], serves: bool) -> Vec<String> {
    let mut faults = Vec::new();
    for kind in ["MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"] {
        let bound: Vec<&str> = objects
            .iter()
            .filter(|object| text(object, "/kind").is_some_and(|binding| binding == format!("{kind}Binding")))
            .filter_map(|object| text(object, "/spec/policyName"))
            .collect();
        for policy in of_kind(objects, kind) {
            let name = text(policy, "/metadata/name").unwrap_or("?");
            if !bound.contains(&name) {
                faults.push(format!("{kind} {name} is bound by nothing"));
            }
        }
    }
    for policy in of_kind(objects, "MutatingAdmissionPolicy") {
        let mut say = |what: &str| faults.push(format!("the injection of the guard {what}"));
        if !serves {
            say("adds volumes that nobody serves");
        }
        if text(policy, "/spec/failurePolicy") != Some("Ignore") {
            say("may keep pods from running");
        }
        if text(policy, "/spec/reinvocationPolicy") != Some("IfNeeded") {
            say("misses containers that others add");
        }
        let rules = "/spec/matchConstraints";
        let label = policy.pointer(&format!("{rules}/objectSelector/matchLabels")).cloned();
        if label != Some(json!({GUARD_LABEL: "true"})) {
            say("meets pods that did not opt in");
        }
        let excluded = policy.pointer(&format!("{rules}/namespaceSelector/matchExpressions/0"));
        let spared = |namespace: &str| {
            let names = excluded.and_then(|e| e.get("values")).and_then(Value::as_array);
            excluded.is_some_and(|e| text(e, "/operator") == Some("NotIn"))
                && names.into_iter().flatten().any(|name| name == namespace)
        };
        if !spared("kube-system") || !spared(NAMESPACE) {
            say("meets pods of the system");
        }
        let change = text(policy, "/spec/mutations/0/applyConfiguration/expression").unwrap_or_default();
        let parts =
            ["containers: ", "initContainers: ", GUARD_DRIVER, GUARD_VOLUME, GUARD_MOUNT, GUARD_PRELOAD];
        if !parts.iter().all(|part| change.contains(part)) {
            say("is not whole");
        }
    }
    faults
}

/// The arguments of every container.
fn arguments(daemon_set: &Value) -> impl Iterator<Item = &str> {
    containers(daemon_set)
        .filter_map(|container| container.get("args").and_then(Value::as_array))
        .flatten()
        .filter_map(Value::as_str)
}

fn mounts(daemon_set: &Value) -> impl Iterator<Item = &str> {
    containers(daemon_set)
        .filter_map(|container| container.get("volumeMounts").and_then(Value::as_array))
        .flatten()
        .filter_map(|mount| text(mount, "/mountPath"))
}

fn host_paths(daemon_set: &Value) -> impl Iterator<Item = &str> {
    let volumes = daemon_set.pointer("/spec/template/spec/volumes").and_then(Value::as_array);
    volumes.into_iter().flatten().filter_map(|volume| text(volume, "/hostPath/path"))
}

fn containers(object: &Value) -> impl Iterator<Item = &Value> {
    let containers = object.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    containers.into_iter().flatten()
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
            for argument in arguments(object).filter_map(|argument| argument.strip_prefix("--")) {
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

    fn pod() -> Value {
        json!({"securityContext": {"runAsNonRoot": true},
            "tolerations": [{"key": "highwater.dev/memory-pressure"}],
            "containers": [{"securityContext": {"readOnlyRootFilesystem": true},
                "resources": {"requests": {"cpu": "1m"}, "limits": {"memory": "1Mi"}}}]})
    }

    #[test]
    fn a_container_that_keeps_capabilities_is_found() {
        assert_eq!(pod_faults(&pod(), Part::Other, false), ["has more privilege than it needs"]);
        let mut agent = pod();
        let context = &mut agent["containers"][0]["securityContext"];
        context["allowPrivilegeEscalation"] = json!(false);
        context["capabilities"] = evidence();
        assert!(pod_faults(&agent, Part::Agent, false).is_empty());
        assert_eq!(pod_faults(&agent, Part::Other, false), ["has more privilege than it needs"]);
    }

    #[test]
    fn a_keeper_with_a_token_or_the_agents_capabilities_is_found() {
        let mut keeper = pod();
        let context = &mut keeper["containers"][0]["securityContext"];
        context["allowPrivilegeEscalation"] = json!(false);
        context["capabilities"] = json!({"drop": ["ALL"]});
        assert_eq!(pod_faults(&keeper, Part::Keeper, false), ["has a token for the API server"]);
        keeper["automountServiceAccountToken"] = json!(false);
        assert!(pod_faults(&keeper, Part::Keeper, false).is_empty());
        // To park it needs both, or neither.
        keeper["containers"][0]["securityContext"]["capabilities"] = reach();
        assert_eq!(
            pod_faults(&keeper, Part::Keeper, false),
            ["may reach into processes that it does not see"]
        );
        keeper["hostPID"] = json!(true);
        assert!(pod_faults(&keeper, Part::Keeper, false).is_empty());
        keeper["containers"][0]["securityContext"]["capabilities"] = evidence();
        assert_eq!(
            pod_faults(&keeper, Part::Keeper, false),
            ["sees the processes of the host", "has more privilege than it needs"]
        );
    }

    /// A DaemonSet with a folder of the host and one argument.
    fn daemon_set(component: &str, folder: &str, argument: &str) -> Value {
        json!({"kind": "DaemonSet", "metadata": {"labels": {"app.kubernetes.io/component": component}},
            "spec": {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {"spec": {
                    "terminationGracePeriodSeconds": 30,
                    "containers": [{"args": [argument, "--end-seconds=20"], "volumeMounts": [{"mountPath": folder}]}],
                    "volumes": [{"hostPath": {"path": folder}}]}}}})
    }

    #[test]
    fn an_agent_that_looks_for_the_keeper_elsewhere_is_found() {
        let agent = daemon_set("agent", "/run/k", "--keeper-socket=/run/k/keeper.sock");
        let keeper = daemon_set("keeper", "/run/k", "serve");
        assert_eq!(guard_faults(&[agent.clone(), keeper.clone()]), Vec::<String>::new());
        let elsewhere = daemon_set("keeper", "/run/other", "serve");
        assert_eq!(
            guard_faults(&[agent.clone(), elsewhere]),
            ["agent and keeper do not both have the folder /run/k"]
        );
        assert_eq!(guard_faults(&[agent]).len(), 1, "a socket and no keeper");
        assert_eq!(guard_faults(&[keeper]).len(), 1, "a keeper and no socket");
    }

    #[test]
    fn a_keeper_that_is_replaced_before_it_handed_over_is_found() {
        let agent = daemon_set("agent", "/run/k", "--keeper-socket=/run/k/keeper.sock");
        let mut keeper = daemon_set("keeper", "/run/k", "serve");
        keeper["spec"]["updateStrategy"]["rollingUpdate"] = json!({"maxSurge": 0, "maxUnavailable": 1});
        assert_eq!(
            guard_faults(&[agent, keeper]),
            ["an upgrade ends the keeper before another has what it holds"]
        );
    }

    #[test]
    fn a_keeper_that_may_be_killed_in_the_middle_of_its_end_is_found() {
        let mut keeper = daemon_set("keeper", "/run/k", "serve");
        assert_eq!(grace_fault(&keeper), None);
        let spec = "/spec/template/spec";
        let with = |keeper: &mut Value, grace: Value, arguments: Value| {
            let spec = keeper.pointer_mut(spec).unwrap();
            spec["terminationGracePeriodSeconds"] = grace;
            spec["containers"][0]["args"] = arguments;
            grace_fault(keeper).is_some()
        };
        assert!(!with(&mut keeper, json!(120), json!(["--end-seconds=110"])));
        assert!(with(&mut keeper, json!(120), json!(["--end-seconds=111"])));
        assert!(with(&mut keeper, json!(120), json!(["--end-seconds=20"])), "time that is given is used");
        assert!(with(&mut keeper, json!(120), json!(["--end-seconds=110", "--end-seconds=200"])));
        assert!(with(&mut keeper, json!(120), json!(["serve"])));
        assert!(with(&mut keeper, Value::Null, json!(["--end-seconds=20"])));
    }

    #[test]
    fn an_injection_without_a_server_or_without_bounds_is_found() {
        let policy = json!({"kind": "MutatingAdmissionPolicy", "metadata": {"name": "a"}, "spec": {}});
        let faults = admission_faults(&[policy], false);
        for fault in
            ["bound by nothing", "nobody serves", "keep pods from running", "did not opt in", "of the system"]
        {
            assert!(faults.iter().any(|found| found.contains(fault)), "{fault} is not in {faults:?}");
        }
    }

    #[test]
    fn a_template_that_reads_former_values_as_they_are_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("_helpers.tpl", "");
        write("settled.yaml", &format!("{SETTLE}kind: A\n"));
        assert_eq!(unsettled(folder.path()).unwrap(), Vec::<String>::new());
        write("hasty.yaml", &format!("kind: A\n{SETTLE}"));
        assert_eq!(unsettled(folder.path()).unwrap().len(), 1);
    }

    #[test]
    fn renderings_that_differ_are_told_apart() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(difference("a\nb\n", "a\nc\n").unwrap(), "\"b\" and \"c\"");
        assert!(difference("a\nb\n", "a\n").is_some());
    }

    #[test]
    fn an_agent_that_may_evict_is_found() {
        let role =
            json!({"rules": [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]});
        assert_eq!(role_faults(&role, "highwater-agent").len(), 1);
        assert_eq!(role_faults(&role, "highwater-operator"), Vec::<String>::new());
    }
}
