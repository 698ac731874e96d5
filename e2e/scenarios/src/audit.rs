//! What Highwater's own service accounts wrote, as the API server's audit log has it.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde::Deserialize;

use crate::{SYSTEM, Scenario};

/// One request that changes something, by one of our service accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// When the API server received it.
    pub at: Timestamp,
    /// Service account, without its namespace.
    pub account: String,
    /// `create`, `patch`, ...
    pub verb: String,
    /// Resource, with its subresource behind a slash.
    pub resource: String,
    /// Namespace of the object; empty where it has none.
    pub namespace: String,
    /// Name of the object; empty where the server was to choose it.
    pub name: String,
    /// Status code of the answer.
    pub code: u16,
    /// Whether it was a dry run.
    pub dry_run: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    request_received_timestamp: Timestamp,
    #[serde(rename = "requestURI")]
    request_uri: String,
    verb: String,
    user: User,
    object_ref: Option<ObjectRef>,
    response_status: Option<Status>,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ObjectRef {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct Status {
    code: u16,
}

impl Write {
    /// The write that a line of the log tells of, if it is one of ours and not of a lease.
    fn of(line: &str) -> Result<Option<Self>> {
        let line: Line = serde_json::from_str(line).with_context(|| format!("an audit line: {line}"))?;
        let own = format!("system:serviceaccount:{SYSTEM}:");
        let Some(account) = line.user.username.strip_prefix(&own) else { return Ok(None) };
        let object = line.object_ref.unwrap_or_default();
        if object.resource == "leases" {
            return Ok(None);
        }
        let resource = match object.subresource.as_str() {
            "" => object.resource,
            sub => format!("{}/{sub}", object.resource),
        };
        Ok(Some(Self {
            at: line.request_received_timestamp,
            account: account.to_owned(),
            verb: line.verb,
            resource,
            namespace: object.namespace,
            name: object.name,
            code: line.response_status.map_or(0, |status| status.code),
            dry_run: line.request_uri.contains("dryRun=All"),
        }))
    }
}

/// The log from a moment on, as it grows.
#[derive(Debug)]
pub(crate) struct Tail {
    log: File,
    /// A line that is still being written.
    begun: Vec<u8>,
}

impl Tail {
    pub(crate) fn from_now_on(log: &Path) -> Result<Self> {
        let mut file = File::open(log).with_context(|| format!("opening {}", log.display()))?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { log: file, begun: Vec::new() })
    }

    /// What was written since this was asked last.
    pub(crate) fn more(&mut self) -> Result<Vec<Write>> {
        self.log.read_to_end(&mut self.begun).context("reading the audit log")?;
        let mut writes = Vec::new();
        while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            writes.extend(Write::of(std::str::from_utf8(&line)?)?);
        }
        Ok(writes)
    }
}

impl Scenario {
    /// Every write by Highwater since `since`, oldest first, leases apart.
    pub fn writes_since(&self, since: Timestamp) -> Result<Vec<Write>> {
        let path = self.cluster.paths.audit_log();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let mut writes = Vec::new();
        // The last line may still be being written.
        for line in text.lines().filter(|line| line.ends_with('}')) {
            writes.extend(Write::of(line)?.filter(|write| write.at >= since));
        }
        Ok(writes)
    }

    /// The evictions that the API server granted Highwater since `since`, dry runs apart.
    pub fn evictions_since(&self, since: Timestamp) -> Result<Vec<Write>> {
        let mut writes = self.writes_since(since)?;
        writes.retain(|write| write.resource == "pods/eviction" && !write.dry_run && write.code < 300);
        Ok(writes)
    }
}
