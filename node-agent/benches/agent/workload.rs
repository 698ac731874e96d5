//! The process of a pod that crosses its limit: this program again, told what to do by a line.

use std::io::{BufRead, stdin};

use anyhow::{Result, bail};
use gpusim::{
    client::{Client, socket_path},
    protocol::{MemoryKind, ProcessList, Region, Reply, Request},
};

/// First argument; the second is the device's index.
pub(crate) const ARGUMENT: &str = "workload";
/// Line that makes it take [`EXTRA`] bytes more.
pub(crate) const GROW: &str = "grow\n";
/// Line that makes it give them back.
pub(crate) const SHRINK: &str = "shrink\n";
/// What it holds always, beside its context.
pub(crate) const BASE: u64 = 4 << 30;
const EXTRA: u64 = 8 << 30;

pub(crate) fn run() -> Result<()> {
    let device = std::env::args().nth(2).unwrap_or_default().parse()?;
    let region = Region { device, instance: None };
    let mut client = Client::connect(&socket_path())?;
    client.call(&Request::Attach { devices: vec![device], lists: vec![ProcessList::Compute] })?;
    client.call(&Request::CreateContext(region))?;
    let allocate = |client: &mut Client, bytes| {
        let request = Request::Allocate { region, kind: MemoryKind::Plain, bytes, context: None };
        match client.call(&request)? {
            Reply::Made(id) => Ok(id),
            other => bail!("expected an allocation, got {other:?}"),
        }
    };
    allocate(&mut client, BASE)?;
    let mut extra = None;
    for line in stdin().lock().lines() {
        match (line?.as_str(), extra.take()) {
            ("grow", None) => extra = Some(allocate(&mut client, EXTRA)?),
            ("shrink", Some(id)) => {
                client.call(&Request::Free(id))?;
            }
            (line, _) => bail!("{line:?} makes no sense now"),
        }
    }
    Ok(())
}
