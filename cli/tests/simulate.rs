//! The program as people run it: files in, decisions out, and what it says of bad ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use flate2::{Compression, write::GzEncoder};
use serde_json::Value;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const HEADER: &str = "pod,device,seconds,bytes,capacity";

struct Bench {
    folder: TempDir,
}

struct Answer {
    status: i32,
    /// Standard output.
    out: String,
    /// Standard error.
    err: String,
}

impl Answer {
    fn of(output: Output) -> Self {
        Self {
            status: output.status.code().expect("ended by itself"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    fn decisions(&self) -> Vec<Value> {
        assert_eq!(self.status, 0, "{}", self.err);
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Kinds of the decisions about a pod.
    fn kinds(&self, pod: &str) -> Vec<String> {
        let of = |d: &Value| (d["pod"] == pod).then(|| d["kind"].as_str().unwrap().to_owned());
        self.decisions().iter().filter_map(of).collect()
    }
}

impl Bench {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn run(args: &[&str]) -> Answer {
        Answer::of(Command::new(env!("CARGO_BIN_EXE_kubectl-highwater")).args(args).output().unwrap())
    }

    /// Replays a text, with further arguments.
    fn series(&self, text: &str, args: &[&str]) -> Answer {
        let file = self.file("series.csv", text);
        Self::run(&[&["simulate", "-o", "json", "--series", file.to_str().unwrap()], args].concat())
    }
}

/// A pod sampled every 10 s: `bytes` of the second, in a device of 80 GiB.
fn pod(name: &str, hours: u64, bytes: impl Fn(u64) -> u64) -> String {
    let mut text = String::new();
    for second in (0..hours * 3600).step_by(10) {
        writeln!(text, "{name},0,{second},{},{}", bytes(second), 80 * GIB).unwrap();
    }
    text
}

/// 20 GiB, and 6 GiB an hour more: full after 10 hours.
fn leak(second: u64) -> u64 {
    20 * GIB + 6 * GIB * second / 3600
}

/// 20 GiB with a tooth of 2 GiB every 5 minutes.
fn steady(second: u64) -> u64 {
    20 * GIB + GIB * (second % 300) / 150
}

#[test]
fn a_leak_is_suspected_acted_on_and_runs_into_the_marks() {
    let bench = Bench::new();
    let text = format!("{HEADER}\n{}{}", pod("leaks", 10, leak), pod("steady", 10, steady));
    let answer = bench.series(&text, &[]);
    let kinds = answer.kinds("leaks");
    for kind in ["suspect", "act", "warning", "critical", "emergency"] {
        assert_eq!(kinds.iter().filter(|k| *k == kind).count(), 1, "{kind} in {kinds:?}");
    }
    assert_eq!(answer.kinds("steady"), [""; 0]);

    let act = answer.decisions().into_iter().find(|d| d["kind"] == "act").unwrap();
    assert_eq!((&act["pod"], &act["device"], &act["life"]), (&"leaks".into(), &"0".into(), &0.into()));
    assert_eq!(act["class"], "linear");
    let slope = act["slope_bytes_per_hour"].as_f64().unwrap() / 6.0 / f64::from(1 << 30);
    assert!((0.8..1.2).contains(&slope), "{act}");
    let left = act["exhaustion_seconds"].as_u64().unwrap() + act["seconds"].as_u64().unwrap();
    assert!((34_000..38_000).contains(&left), "{act}");
    assert!(act["exhaustion_seconds"].as_u64().unwrap() >= 600, "{act}");
    assert!((0.0..=1.0).contains(&act["confidence"].as_f64().unwrap()), "{act}");
    assert!(!act["reason"].as_str().unwrap().is_empty());
    assert_eq!(act.as_object().unwrap().len(), 10);
}

#[test]
fn rows_of_several_pods_may_alternate() {
    let bench = Bench::new();
    let (one, other) = (pod("leaks", 10, leak), pod("steady", 10, steady));
    let apart = bench.series(&format!("{HEADER}\n{one}{other}"), &[]);
    let mixed: String = one.lines().zip(other.lines()).flat_map(|(a, b)| [a, "\n", b, "\n"]).collect();
    assert_eq!(bench.series(&format!("{HEADER}\n{mixed}"), &[]).out, apart.out);
}

#[test]
fn without_a_capacity_only_suspicion_is_left_and_that_is_said_once() {
    let bench = Bench::new();
    let rows = format!("{}{}", pod("a", 10, leak), pod("b", 10, leak));
    let without: String = rows.lines().flat_map(|line| [line.rsplit_once(',').unwrap().0, "\n"]).collect();
    let text = format!("pod,device,seconds,bytes\n{without}");
    let answer = bench.series(&text, &[]);
    assert_eq!(answer.kinds("a"), ["suspect"]);
    assert_eq!(answer.decisions()[0]["exhaustion_seconds"], Value::Null);
    assert_eq!(answer.err.matches("2 of 2 series have no capacity").count(), 1, "{}", answer.err);
    // Given by hand, it is the same as in the file.
    let given = bench.series(&text, &["--capacity", "80Gi"]);
    assert_eq!(given.out, bench.series(&format!("{HEADER}\n{rows}"), &[]).out);
}

#[test]
fn a_change_of_life_begins_anew() {
    let bench = Bench::new();
    let mut text = "pod,device,seconds,bytes,capacity,life\n".to_owned();
    // Ten lives of an hour each, none of which gets anywhere.
    for second in (0..36_000).step_by(10) {
        writeln!(text, "a,0,{second},{},{},{}", leak(second % 3600), 80 * GIB, second / 3600).unwrap();
    }
    assert!(!bench.series(&text, &[]).kinds("a").contains(&"act".to_owned()));
    // A leak, a restart, a leak: the second life is told by its number.
    let mut text = "pod,device,seconds,bytes,capacity,life\n".to_owned();
    for (life, second) in (1..=2).flat_map(|life| (0..36_000).step_by(10).map(move |second| (life, second))) {
        writeln!(text, "a,0,{second},{},{},{life}", leak(second), 80 * GIB).unwrap();
    }
    let answer = bench.series(&text, &[]);
    let acts: Vec<Value> = answer.decisions().into_iter().filter(|d| d["kind"] == "act").collect();
    let lives: Vec<&Value> = acts.iter().map(|act| &act["life"]).collect();
    assert_eq!(lives, [1, 2], "{}", answer.out);
    let oom = answer.decisions().into_iter().find(|d| d["kind"] == "oom").unwrap();
    assert_eq!((&oom["life"], &oom["seconds"]), (&1.into(), &35_990.into()), "{oom}");
    assert!(oom["reason"].as_str().unwrap().contains("the pod was started anew"), "{oom}");
    assert!(oom["reason"].as_str().unwrap().contains("an act was due"), "{oom}");
}

#[test]
fn a_life_that_ended_under_suspicion_says_nothing_of_what_is_usual() {
    let bench = Bench::new();
    let mut text = "pod,device,seconds,bytes,capacity,life\n".to_owned();
    for (life, seconds) in [(1, 18_000), (2, 36_000)] {
        for second in (0..seconds).step_by(10) {
            writeln!(text, "a,0,{second},{},{},{life}", leak(second), 80 * GIB).unwrap();
        }
    }
    let decisions = bench.series(&text, &[]).decisions();
    let first: Vec<_> = decisions.iter().filter(|d| d["life"] == 1).map(|d| d["kind"].as_str()).collect();
    assert_eq!(first, [Some("suspect"), Some("ended")], "it was rolled out before an act was due");
    let ended = decisions.iter().find(|d| d["kind"] == "ended").unwrap();
    assert_eq!((&ended["seconds"], &ended["class"]), (&17_990.into(), &Value::Null), "{ended}");
    assert!(decisions.iter().any(|d| d["life"] == 2 && d["kind"] == "act"));
    let told = decisions.iter().find(|d| d["reason"].as_str().unwrap().contains("healthy lives"));
    assert_eq!(told, None);
}

#[test]
fn a_suspicion_that_is_dropped_is_said_to_be_over() {
    let bench = Bench::new();
    // It grows for four hours, and is level from then on.
    let text = format!("{HEADER}\n{}", pod("a", 40, |second| leak(second.min(4 * 3600))));
    let answer = bench.series(&text, &[]);
    assert_eq!(answer.kinds("a"), ["suspect", "cleared"], "{}", answer.out);
    let cleared = answer.decisions().pop().unwrap();
    assert!(cleared["seconds"].as_u64().unwrap() > 4 * 3600, "{cleared}");
    assert_eq!((&cleared["class"], &cleared["exhaustion_seconds"]), (&Value::Null, &Value::Null));
    assert!(cleared["reason"].as_str().unwrap().contains("no scale has seen growth any more"), "{cleared}");
    assert!(!answer.err.contains("under suspicion"), "{}", answer.err);

    let text = format!("{HEADER}\n{}", pod("a", 4, leak));
    let answer = bench.series(&text, &[]);
    assert_eq!(answer.kinds("a"), ["suspect"]);
    assert!(answer.err.contains("1 of 1 series are under suspicion where their rows end"), "{}", answer.err);

    // Another device in its place: what was thought goes with what was seen.
    let mut text = text;
    for second in (4 * 3600..5 * 3600).step_by(10) {
        writeln!(text, "a,0,{second},{},{}", 20 * GIB, 800 * GIB).unwrap();
    }
    let answer = bench.series(&text, &[]);
    assert_eq!(answer.kinds("a"), ["suspect", "cleared"], "{}", answer.out);
    assert_eq!(answer.decisions()[1]["seconds"], 4 * 3600);
}

#[test]
fn a_quota_is_what_a_pod_can_come_to() {
    let bench = Bench::new();
    let policy = |quota: &str| {
        let text = format!(
            "apiVersion: highwater.dev/v1alpha1\nkind: GpuMemoryPolicy\nmetadata: {{name: p}}\n\
             spec: {{nodes: {{}}, mode: Enforce, leaks: {{}}, quota: {{{quota}}}}}\n"
        );
        bench.file("policy.yaml", text).to_str().unwrap().to_owned()
    };
    let act = |answer: &Answer| {
        let decisions = answer.decisions();
        decisions.iter().find(|d| d["kind"] == "act").map(|d| d["seconds"].as_u64().unwrap())
    };
    let text = format!("{HEADER}\n{}", pod("a", 10, leak));
    let whole = act(&bench.series(&text, &["--policy", &policy("")])).unwrap();
    // 50 GiB are reached after five hours, not after ten.
    let limited = policy("default: {limit: 50Gi}");
    let answer = bench.series(&text, &["--policy", &limited]);
    assert!(act(&answer).unwrap() < 5 * 3600 && whole > 8 * 3600, "{whole}: {}", answer.out);
    assert!(answer.out.contains("of 50.0 GiB, full in"), "{}", answer.out);
    assert!(answer.err.contains("1 of 1 series have a limit by the quota of the policy"), "{}", answer.err);
    // It is known even where the size of the device is not, and never more than that.
    let without: String = text.lines().flat_map(|line| [line.rsplit_once(',').unwrap().0, "\n"]).collect();
    let bare = bench.series(&without, &["--policy", &limited]);
    assert_eq!(act(&bare), act(&answer));
    assert!(bare.err.contains("neither marks nor oom can be said"), "{}", bare.err);
    assert_eq!(act(&bench.series(&text, &["--policy", &policy("default: {limit: 800Gi}")])), Some(whole));
    // It says nothing of memory on the host.
    let host = text.replace("a,0,", "a,host,");
    assert_eq!(act(&bench.series(&host, &["--policy", &limited])), Some(whole));
}

#[test]
fn rules_of_a_quota_select_by_labels_that_the_recording_or_the_command_line_gives() {
    let bench = Bench::new();
    let policy = bench.file(
        "policy.yaml",
        "kind: GpuMemoryPolicy\napiVersion: highwater.dev/v1alpha1\nmetadata: {name: p}\nspec:\n  nodes: {}\n  \
         mode: Enforce\n  leaks: {}\n  quota:\n    rules:\n      - {name: small, limit: 50Gi, pods: {matchLabels: \
         {tier: small}}}\n",
    );
    let policy = policy.to_str().unwrap();
    let plain = format!("{HEADER}\n{}{}", pod("a", 10, leak), pod("b", 10, leak));
    let labelled: String = plain
        .lines()
        .map(|line| match line.split(',').next() {
            Some("pod") => format!("{line},tier\n"),
            Some("a") => format!("{line},small\n"),
            _ => format!("{line},\n"),
        })
        .collect();
    let act = |answer: &Answer, pod: &str| {
        let decisions = answer.decisions();
        decisions.iter().find(|d| d["kind"] == "act" && d["pod"] == pod).unwrap()["seconds"].as_u64().unwrap()
    };
    let answer = bench.series(&labelled, &["--policy", policy]);
    assert!(act(&answer, "a") < 5 * 3600 && act(&answer, "b") > 8 * 3600, "{}", answer.out);
    assert!(answer.err.contains("1 of 2 series have a limit"), "{}", answer.err);
    assert!(!answer.err.contains("is not read"), "{}", answer.err);

    let answer = bench.series(&plain, &["--policy", policy]);
    assert!(act(&answer, "a") > 8 * 3600);
    let told = "2 of 2 series have no limit here, since the recording does not give the label tier";
    assert!(answer.err.contains(told), "{}", answer.err);

    let answer = bench.series(&plain, &["--policy", policy, "--labels", "tier=small,app=x"]);
    assert!(act(&answer, "a") < 5 * 3600 && act(&answer, "b") < 5 * 3600, "{}", answer.out);
    assert!(answer.err.contains("--labels app decides nothing"), "{}", answer.err);
}

#[test]
fn pod_and_device_may_have_other_names_in_a_table_too() {
    let bench = Bench::new();
    let text = format!("{HEADER}\n{}", pod("a", 10, leak));
    let renamed = text.replacen("pod,device", "server,slot", 1);
    let answer = bench.series(&renamed, &["--pod-label", "server", "--device-label", "slot"]);
    assert_eq!(answer.out, bench.series(&text, &[]).out);
    let answer = bench.series(&text, &["--pod-label", "server"]);
    assert_eq!(answer.status, 2);
    assert!(answer.err.contains("line 1: there is no column server among"), "{}", answer.err);
    assert_eq!(bench.series(&text, &["--pod-label", ""]).status, 2);
}

#[test]
fn a_policy_that_only_observes_says_so_once_and_what_it_would_do() {
    let bench = Bench::new();
    let policy = bench.file(
        "policy.yaml",
        "kind: GpuMemoryPolicy\napiVersion: highwater.dev/v1alpha1\nmetadata: {name: p}\nspec: {nodes: {}, mode: \
         Observe, leaks: {actions: [{type: Restart}]}}\n",
    );
    let text = format!("{HEADER}\n{}", pod("a", 10, leak));
    let answer = bench.series(&text, &["--policy", policy.to_str().unwrap()]);
    assert!(answer.kinds("a").contains(&"act".to_owned()));
    let told = "the policy is in mode Observe: it measures, opens no incident and does nothing. In mode Enforce it \
                would have done: at act Restart";
    assert_eq!(answer.err.matches(told).count(), 1, "{}", answer.err);
}

#[test]
fn time_that_goes_back_is_passed_over_and_counted() {
    let bench = Bench::new();
    let clean = format!("{HEADER}\n{}", pod("leaks", 10, leak));
    let mut lines: Vec<&str> = clean.lines().collect();
    let old = lines[1].replace(",0,0,", ",0,5,");
    lines.insert(100, &old);
    lines.insert(200, lines[199]);
    let answer = bench.series(&format!("{}\n", lines.join("\n")), &[]);
    assert_eq!(answer.out, bench.series(&clean, &[]).out);
    assert!(
        answer.err.contains("1 sample passed over because time went back, first in line 101"),
        "{}",
        answer.err
    );
    assert!(answer.err.contains("1 sample passed over whose time was there already"), "{}", answer.err);
}

#[test]
fn missing_numbers_lead_to_nothing() {
    let bench = Bench::new();
    let text = format!("{HEADER}\n{}", pod("a", 10, leak));
    let mut holes = String::new();
    for (n, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split(',').collect();
        let bytes = if n > 1000 { "NaN" } else { fields[3] };
        writeln!(holes, "{},{bytes},{}", fields[..3].join(","), fields[4]).unwrap();
    }
    let answer = bench.series(&holes, &[]);
    assert!(answer.kinds("a").iter().all(|kind| kind == "suspect"), "{}", answer.out);
    assert!(answer.err.contains("2600 samples had no number of bytes: missing, not 0"), "{}", answer.err);
}

#[test]
fn what_is_packed_or_piped_is_the_same() {
    let bench = Bench::new();
    let text = format!("{HEADER}\n{}", pod("leaks", 10, leak));
    let plain = bench.series(&text, &[]);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let bytes = encoder.finish().unwrap();
    let packed = bench.file("series.csv.gz", &bytes);
    let packed = Bench::run(&["simulate", "-o", "json", "--series", packed.to_str().unwrap()]);
    assert_eq!(packed.out, plain.out);

    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-highwater"))
        .args(["simulate", "-o", "json", "--series", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert_eq!(Answer::of(child.wait_with_output().unwrap()).out, plain.out);

    let cut = bench.file("cut.csv.gz", &bytes[..bytes.len() / 2]);
    let cut = Bench::run(&["simulate", "--series", cut.to_str().unwrap()]);
    assert_eq!(cut.status, 2);
    assert!(cut.err.contains("the file ends in the middle: copy it anew"), "{}", cut.err);
}

#[test]
fn a_saved_range_query_is_replayed_as_the_same_numbers_in_a_table() {
    let bench = Bench::new();
    let values: Vec<String> =
        (0..36_000).step_by(10).map(|second| format!("[{second},\"{}\"]", leak(second))).collect();
    let json = format!(
        r#"{{"status":"success","data":{{"resultType":"matrix","result":[
            {{"metric":{{"namespace":"llm","pod":"a","device":"0"}},"values":[{}]}}]}}}}"#,
        values.join(",")
    );
    let file = bench.file("range.json", json);
    let args = ["simulate", "-o", "json", "--capacity", "80Gi", "--prometheus-range", file.to_str().unwrap()];
    let answer = Bench::run(&args);
    let expected = bench.series(&format!("{HEADER}\n{}", pod("llm/a", 10, leak)), &[]);
    assert_eq!(answer.out, expected.out);
    assert!(answer.kinds("llm/a").contains(&"act".to_owned()));
}

#[test]
fn the_policy_decides() {
    let bench = Bench::new();
    let policy = |spec: &str| {
        let text = format!(
            "apiVersion: highwater.dev/v1alpha1\nkind: GpuMemoryPolicy\nmetadata: {{name: p}}\n\
             spec: {{nodes: {{}}, {spec}}}\n"
        );
        bench.file("policy.yaml", text)
    };
    let text = format!("{HEADER}\n{}", pod("a", 10, leak));
    let file = policy(
        "breakers: [{scope: Device, warning: {tripPercent: 40, clearPercent: 35, holdMilliseconds: 60000}}], \
         leaks: {horizonMilliseconds: 900000}",
    );
    let answer = bench.series(&text, &["--policy", file.to_str().unwrap()]);
    let warning = answer.decisions().into_iter().find(|d| d["kind"] == "warning").unwrap();
    // 40 % of 80 GiB is reached after 2 h, and held for a minute.
    assert_eq!(warning["seconds"], 7260, "{warning}");
    assert!(!answer.kinds("a").contains(&"critical".to_owned()));
    let seconds = |answer: &Answer| {
        answer.decisions().iter().find(|d| d["kind"] == "act").map(|d| d["seconds"].as_u64().unwrap())
    };
    // A shorter horizon acts later.
    assert!(seconds(&answer) > seconds(&bench.series(&text, &[])), "{}", answer.out);

    let file = policy("leaks: {horizon: 5}");
    let answer = bench.series(&text, &["--policy", file.to_str().unwrap()]);
    assert_eq!(answer.status, 2);
    assert!(
        answer.err.contains("policy.yaml: spec.leaks.horizon is no field of a GpuMemoryPolicy"),
        "{}",
        answer.err
    );
}

#[test]
fn every_example_can_be_replayed() {
    let bench = Bench::new();
    let text = format!("{HEADER}\na,0,0,1,2\n");
    let mut found = 0;
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples")).unwrap() {
        let path = entry.unwrap().path();
        if fs::read_to_string(&path).unwrap().contains("kind: GpuMemoryPolicy") {
            let answer = bench.series(&text, &["--policy", path.to_str().unwrap()]);
            assert_eq!(answer.status, 0, "{}: {}", path.display(), answer.err);
            found += 1;
        }
    }
    assert!(found > 0);
}

#[test]
fn bad_input_ends_with_status_2_and_the_line() {
    let bench = Bench::new();
    for (text, expected) in [
        ("pod,seconds,value\na,1,2\n", "series.csv: line 1: there is no column device"),
        ("pod,device,seconds,bytes\na,0,1,2\na,0,2,x\n", "series.csv: line 3: column bytes is \"x\": write"),
        ("pod,device,seconds,bytes\na,0,1\n", "series.csv: line 2: there are 3 fields"),
        ("pod,device,seconds,bytes\n\"a,0,1,1\n", "series.csv: line 2: a quote is not closed"),
        ("", "series.csv: is empty"),
    ] {
        let answer = bench.series(text, &[]);
        assert_eq!((answer.status, answer.out.as_str()), (2, ""), "{text}");
        assert!(answer.err.starts_with("error: ") && answer.err.contains(expected), "{}", answer.err);
    }
    let answer = bench.series("", &["--policy", "/nowhere.yaml"]);
    assert_eq!(answer.status, 2);
    assert!(answer.err.contains("/nowhere.yaml: cannot be read"), "{}", answer.err);
    let folder = Bench::run(&["simulate", "--series", "/"]);
    assert_eq!(folder.status, 2);
    assert!(folder.err.contains("/: is a folder: name a file"), "{}", folder.err);
    let latin = bench.file("latin.csv", b"pod,device,seconds,bytes\nb\xe4r,0,1,2\n");
    let latin = Bench::run(&["simulate", "--series", latin.to_str().unwrap()]);
    assert!(latin.err.contains("latin.csv: line 2: the name of the pod is no UTF-8 text"), "{}", latin.err);
}

#[test]
fn the_command_line_says_what_is_missing() {
    assert_eq!(Bench::run(&[]).status, 2);
    for args in [
        vec!["simulate"],
        vec!["simulate", "--series", "a", "--prometheus-range", "b"],
        vec!["simulate", "--series", "a", "--capacity", "0"],
        vec!["simulate", "--series", "a", "--labels", "tier"],
    ] {
        assert_eq!(Bench::run(&args).status, 2, "{args:?}");
    }
    let help = Bench::run(&["simulate", "--help"]);
    assert_eq!(help.status, 0);
    assert!(help.out.contains("kubectl highwater simulate"), "{}", help.out);
}

#[test]
fn few_samples_decide_nothing() {
    let bench = Bench::new();
    assert_eq!(bench.series(&format!("{HEADER}\na,0,5,1,100\n"), &[]).out, "");
    assert_eq!(bench.series(&format!("{HEADER}\n"), &[]).out, "");
    let table = bench.file("one.csv", format!("{HEADER}\na,0,5,1,100\n"));
    let answer = Bench::run(&["simulate", "--series", table.to_str().unwrap()]);
    assert_eq!((answer.status, answer.out.as_str()), (0, "No decisions.\n"));
    assert_eq!(answer.err, "1 sample of 1 series: no decisions\n");
    // Of a file that could not be read nobody knows.
    let broken = bench.file("broken.csv", format!("{HEADER}\na,0,yesterday,1,100\n"));
    let answer = Bench::run(&["simulate", "--series", broken.to_str().unwrap()]);
    assert_eq!((answer.status, answer.out.as_str()), (2, ""));
}

/// A recording with so many decisions that they do not fit into a buffer.
fn many(bench: &Bench) -> PathBuf {
    let mut text = format!("{HEADER}\n");
    for n in 0..20_000 {
        writeln!(text, "a{n},0,1,99,100").unwrap();
    }
    bench.file("many.csv", text)
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let bench = Bench::new();
    let file = many(&bench);
    for format in ["table", "json"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-highwater"))
            .args(["simulate", "-o", format, "--series", file.to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let answer = child.wait_with_output().unwrap();
        assert_eq!((answer.status.code(), answer.stderr.as_slice()), (Some(0), &b""[..]), "{format}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_cannot_be_written_is_a_failure_of_its_own() {
    let bench = Bench::new();
    let (many, few) = (many(&bench), bench.file("few.csv", format!("{HEADER}\na,0,1,99,100\n")));
    for (file, format) in [(&many, "json"), (&many, "table"), (&few, "json"), (&few, "table")] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let answer = Command::new(env!("CARGO_BIN_EXE_kubectl-highwater"))
            .args(["simulate", "-o", format, "--series", file.to_str().unwrap()])
            .stdout(full)
            .output()
            .unwrap();
        let answer = Answer::of(answer);
        assert_eq!(answer.status, 1, "{format}: {}", answer.err);
        assert!(
            answer.err.starts_with("error: the decisions cannot be written: No space left"),
            "{}",
            answer.err
        );
    }
    // Nor is there a panic where nobody can be told.
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_kubectl-highwater"))
        .args(["simulate", "--series", "/"])
        .stdout(full())
        .stderr(full())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2));
}
