//! The supervisor's protocol: a request and a response, each a line of JSON, over a unix socket.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::{namespace::Place, paths::Paths};

/// A program that the supervisor keeps running.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Component {
    /// Unique name, like `kubelet-n1`.
    pub name: String,
    /// Where it runs.
    pub place: Place,
    /// Absolute path of the executable.
    pub program: PathBuf,
    /// Arguments after the program's own name.
    pub arguments: Vec<String>,
    /// Environment beside `PATH` and `HOME`; nothing else is inherited.
    pub environment: BTreeMap<String, String>,
}

impl Component {
    /// A component without an environment of its own.
    pub fn new<A: Into<String>>(
        name: impl Into<String>,
        place: Place,
        program: PathBuf,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { name: name.into(), place, program, arguments, environment: BTreeMap::new() }
    }
}

/// What the supervisor is asked to do.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// Starts a component and keeps it running; one of the same name is stopped and replaced.
    Add(Component),
    /// Stops a component and forgets it.
    Remove(String),
    /// Starts a stopped component.
    Start(String),
    /// SIGTERM, then SIGKILL after three seconds; stays down until started.
    Stop(String),
    /// SIGKILL; stays down until started.
    Kill(String),
    /// SIGSTOP.
    Pause(String),
    /// SIGCONT.
    Resume(String),
    /// Nothing; the response tells how all components are.
    Status,
}

/// The answer: the state of all components after the request, or why it was refused.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Response {
    /// Why the request failed; absent where it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// All components, in the order in which they were added.
    pub components: Vec<ComponentStatus>,
}

/// How a component is.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ComponentStatus {
    /// Its name.
    pub name: String,
    /// The host's pid while it runs.
    pub pid: Option<i32>,
    /// Whether it is meant to run.
    pub wanted: bool,
    /// Whether it is stopped by `Pause`.
    pub paused: bool,
    /// Starts after the first that the supervisor made of itself.
    pub restarts: u32,
    /// How the last run ended.
    pub last_end: Option<String>,
}

/// Sends one request to the cluster's supervisor.
pub fn send(paths: &Paths, request: &Request) -> Result<Vec<ComponentStatus>> {
    let socket = paths.control_socket();
    let mut stream = UnixStream::connect(&socket).with_context(|| {
        format!("no supervisor at {}: is the cluster up? (`cluster up`)", socket.display())
    })?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("reading the supervisor's answer")?;
    let response: Response = serde_json::from_str(&answer).context("reading the supervisor's answer")?;
    match response.error {
        Some(error) => bail!(error),
        None => Ok(response.components),
    }
}
