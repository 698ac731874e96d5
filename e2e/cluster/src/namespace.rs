//! Linux namespaces: entering the cluster's network, and starting programs inside a node.
//!
//! Namespaces belong to threads. A thread that enters one takes the processes and threads that
//! it starts along and leaves the rest of this process where it was.

use std::{
    fs::File,
    os::fd::AsFd as _,
    path::Path,
    process::{Child, Command},
    thread,
};

use anyhow::{Context, Result, anyhow};
use rustix::{
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{
        LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags, move_into_link_name_space,
        move_into_thread_name_spaces, unshare_unsafe,
    },
};
use serde::{Deserialize, Serialize};

/// Where a program runs.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Place {
    /// In the named network namespace, else on the host.
    Network(String),
    /// As the first process of a new node.
    NewNode {
        /// Node name.
        name: String,
        /// The network namespace that the node is in.
        network: String,
    },
    /// In the node's namespaces, beside its first process (the host's pid).
    Node {
        /// Node name.
        name: String,
    },
}

/// Moves the calling thread into a named network namespace (made by `ip netns add`).
pub fn enter_network(name: &str) -> Result<()> {
    let path = Path::new("/run/netns").join(name);
    let file = File::open(&path)
        .with_context(|| format!("no network namespace {name}: is the cluster up? (`cluster up`)"))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("entering the network namespace {name} (this needs root)"))
}

/// Starts a program in its place. `first_process` tells the host's pid of a node's first process.
pub fn spawn(
    place: &Place,
    command: &mut Command,
    first_process: impl Fn(&str) -> Result<Pid> + Sync,
) -> Result<Child> {
    // A thread of its own, since there is no way back out of a namespace.
    thread::scope(|scope| {
        let starter = thread::Builder::new().spawn_scoped(scope, || {
            match place {
                Place::Network(name) => enter_network(name)?,
                Place::NewNode { network, .. } => {
                    enter_network(network)?;
                    unshare(UnshareFlags::NEWNS | UnshareFlags::NEWPID | UnshareFlags::NEWUTS)?;
                }
                Place::Node { name } => enter_node(first_process(name)?)?,
            }
            command.spawn().with_context(|| format!("starting {}", crate::command::display(command)))
        });
        starter?.join().map_err(|_| anyhow!("the starting thread panicked"))?
    })
}

/// Moves the calling thread into all namespaces of a node; processes that it starts from then on
/// are the node's.
fn enter_node(first_process: Pid) -> Result<()> {
    let process = pidfd_open(first_process, PidfdFlags::empty()).context("the node is down")?;
    // A mount namespace can only be entered by a thread with a file system context of its own.
    unshare(UnshareFlags::FS)?;
    move_into_thread_name_spaces(
        process.as_fd(),
        ThreadNameSpaceType::MOUNT
            | ThreadNameSpaceType::NETWORK
            | ThreadNameSpaceType::PROCESS_ID
            | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME,
    )
    .context("entering the node's namespaces")
}

#[allow(unsafe_code)]
fn unshare(flags: UnshareFlags) -> Result<()> {
    // SAFETY: the call is unsafe for UnshareFlags::FILES alone, which no caller here passes.
    unsafe { unshare_unsafe(flags) }.context("making namespaces (this needs root)")
}
