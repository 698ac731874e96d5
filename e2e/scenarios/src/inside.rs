//! What goes on inside of a pod: commands in it, what its script said, and when.

use std::{fs::File, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use highwater_e2e::eventually;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::LogParams};
use serde_json::Value;
use tokio::{process::Command, time::timeout};

use crate::{Scenario, TIMEOUT, restarts};

/// The program that follows scripts, in the image of the pods.
const WORKLOAD: &str = "/usr/bin/workload";

/// What a command in a pod came to.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Whether it ended well.
    pub well: bool,
    /// What it printed, errors behind the rest.
    pub output: String,
}

impl Ran {
    /// What it printed; fails where it did not end well.
    pub fn well(self) -> Result<String> {
        ensure!(self.well, "a command in the pod failed:\n{}", self.output);
        Ok(self.output)
    }
}

/// A line of a pod's log.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it was printed.
    pub at: Timestamp,
    /// What.
    pub text: String,
}

/// How a call that a script made of the driver ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The statement: `alloc`, `vmm`, ...
    pub op: String,
    /// The size that was asked for.
    pub bytes: i64,
    /// `CUresult`: 0 is success, 2 is `CUDA_ERROR_OUT_OF_MEMORY`.
    pub code: u32,
    /// What the process held afterwards, contexts apart.
    pub held: i64,
}

impl Call {
    /// The call that a line tells of, if it does.
    pub fn of(line: &str) -> Option<Self> {
        let (_, fields) = line.split_once(" result ")?;
        let field = |name: &str| {
            let mut fields = fields.split_whitespace().filter_map(|field| field.split_once('='));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        Some(Self {
            op: field("op")?.to_owned(),
            bytes: field("bytes")?.parse().ok()?,
            code: field("code")?.parse().ok()?,
            held: field("held")?.parse().ok()?,
        })
    }

    /// Whether memory was refused.
    pub fn is_refusal(&self) -> bool {
        self.code == 2
    }
}

/// The calls that the output of a script tells of.
pub fn calls(output: &str) -> Vec<Call> {
    output.lines().filter_map(Call::of).collect()
}

/// What the statements `info` in the output of a script say: `free`, `total`, `deviceTotal`, and
/// what NVML says.
pub fn infos(output: &str) -> Result<Vec<Value>> {
    let told = output.lines().filter_map(|line| line.split_once(" info ")).map(|(_, told)| told);
    told.map(|told| serde_json::from_str(told).with_context(|| format!("not an info: {told}"))).collect()
}

impl Scenario {
    /// Runs a command in a pod's container to its end.
    pub async fn exec(&self, pod: &Pod, command: &[&str]) -> Result<Ran> {
        self.run_in(pod, command, None).await
    }

    async fn run_in(&self, pod: &Pod, command: &[&str], input: Option<File>) -> Result<Ran> {
        let mut kubectl = Command::from(self.cluster.kubectl_command());
        kubectl.args(["exec", "-n", &self.namespace]);
        if input.is_some() {
            kubectl.arg("-i");
        }
        kubectl.args([&pod.name_any(), "--"]).args(command);
        kubectl.stdin(input.map_or_else(Stdio::null, Stdio::from)).kill_on_drop(true);
        let output = timeout(TIMEOUT, kubectl.output());
        let output = output.await.with_context(|| format!("{command:?} in the pod did not end"))??;
        let text = [output.stdout, output.stderr].concat();
        Ok(Ran { well: output.status.success(), output: String::from_utf8_lossy(&text).into_owned() })
    }

    /// Follows a script in another process in a pod, to its end. `options` are the program's.
    pub async fn follow(&self, pod: &Pod, options: &[&str], script: &str) -> Result<Ran> {
        self.exec(pod, &[&[WORKLOAD], options, &["--script", script]].concat()).await
    }

    /// Begins to follow a script in another process in a pod; its PID there.
    pub async fn spawn(&self, pod: &Pod, options: &[&str], script: &str) -> Result<String> {
        // Nobody but the pod may hold its end up: `exec` waits for whoever has its output.
        let start = format!("{WORKLOAD} \"$@\" </dev/null >/tmp/spawned 2>&1 & echo $!");
        let command = [&["sh", "-c", &start, "sh"], options, &["--script", script]].concat();
        Ok(self.exec(pod, &command).await?.well()?.trim().to_owned())
    }

    /// Copies a program of the host into a pod.
    pub async fn bring(&self, pod: &Pod, program: &Path, to: &str) -> Result<()> {
        let file = File::open(program).with_context(|| format!("opening {}", program.display()))?;
        let store = format!("cat >{to} && chmod 755 {to}");
        self.run_in(pod, &["sh", "-c", &store], Some(file)).await?.well()?;
        Ok(())
    }

    /// All that a pod's container has printed since it was started.
    pub async fn log(&self, pod: &Pod) -> Result<Vec<Line>> {
        let text = self.raw_log(pod, LogParams { timestamps: true, ..LogParams::default() }).await?;
        text.lines()
            .map(|line| {
                let (at, text) = line.split_once(' ').unwrap_or((line, ""));
                let at = at.parse().with_context(|| format!("no time in front of {line:?}"))?;
                Ok(Line { at, text: text.to_owned() })
            })
            .collect()
    }

    async fn raw_log(&self, pod: &Pod, parameters: LogParams) -> Result<String> {
        let pods: Api<Pod> = self.api();
        Ok(pods.logs(&pod.name_any(), &parameters).await?)
    }

    /// Waits until a pod's script has printed a line with this text, and returns the first.
    ///
    /// Fails at once where the script has failed.
    pub async fn says(&self, pod: &Pod, text: &str) -> Result<Line> {
        self.says_where(pod, text, |line| line.text.contains(text)).await
    }

    /// The same for the first line that satisfies a condition, of which `what` tells people.
    pub async fn says_where(&self, pod: &Pod, what: &str, is: impl Fn(&Line) -> bool) -> Result<Line> {
        let name = pod.name_any();
        let awaited = format!("{name} to say {what:?}");
        let found = eventually(&awaited, TIMEOUT, async || {
            let log = self.log(pod).await?;
            if let Some(line) = log.iter().find(|line| is(line)) {
                return Ok(Ok(line.clone()));
            }
            let now = self.api::<Pod>().get(&name).await?;
            if restarts(&now) > 0 {
                let last = LogParams { previous: true, tail_lines: Some(40), ..LogParams::default() };
                let last = self.raw_log(pod, last).await.unwrap_or_default();
                return Ok(Err(anyhow!("waited for {awaited}, but its script failed:\n{last}")));
            }
            let last: Vec<_> = log.iter().rev().take(12).rev().map(|line| line.text.as_str()).collect();
            Err(anyhow!("it ends:\n{}", last.join("\n")))
        });
        found.await?
    }

    /// Waits until a pod's script has got memory in this way, which it asks for in this size once.
    pub async fn got(&self, pod: &Pod, op: &str, bytes: i64) -> Result<Line> {
        self.says(pod, &format!(" op={op} bytes={bytes} code=0 ")).await
    }

    /// Fails where memory was refused to a pod's script.
    pub async fn refused_nothing(&self, pod: &Pod) -> Result<()> {
        let log = self.log(pod).await?;
        let refused: Vec<_> = log
            .iter()
            .filter(|line| Call::of(&line.text).is_some_and(|call| call.is_refusal()))
            .map(|line| line.text.as_str())
            .collect();
        ensure!(refused.is_empty(), "{} was refused memory: {refused:?}", pod.name_any());
        Ok(())
    }
}

/// How long after `since` something was; 0 if before.
pub(crate) fn elapsed(since: Timestamp, at: Timestamp) -> Duration {
    at.duration_since(since).try_into().unwrap_or_default()
}

impl Line {
    /// How long after `since` it was printed; 0 if before.
    pub fn after(&self, since: Timestamp) -> Duration {
        elapsed(since, self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_infos_are_found_among_what_is_for_people() {
        let output = "[7] 0.001s has a context on device 0\n\
            [7] 0.002s took 1.0 GiB: holds 1.0 GiB\n\
            [7] 0.002s result op=alloc bytes=1073741824 code=0 name=CUDA_SUCCESS call=- held=1073741824\n\
            [7] 0.003s result op=vmm bytes=5 code=2 name=CUDA_ERROR_OUT_OF_MEMORY call=cuMemCreate held=1073741824\n\
            [7] 0.004s info {\"device\":0,\"code\":0,\"free\":1,\"total\":2,\"deviceTotal\":2,\"nvml\":{\"code\":3},\"nvmlV2\":{\"code\":3}}\n\
            [7] 0.005s script ended\n";
        let (alloc, vmm) = (1 << 30, 5);
        let call = |op: &str, bytes, code| Call { op: op.to_owned(), bytes, code, held: 1 << 30 };
        assert_eq!(calls(output), [call("alloc", alloc, 0), call("vmm", vmm, 2)]);
        assert!(calls(output)[1].is_refusal());
        assert_eq!(infos(output).unwrap()[0]["total"], 2);
        assert!(infos("[7] 0.1s info {").is_err());
    }
}
