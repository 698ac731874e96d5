//! The behaviour of the driver: who holds which memory, and what the libraries may see of it.
//!
//! Knows no sockets, processes, cgroups or clocks: callers bring the identity of the process that
//! asks and the time.

mod checkpoint;
mod ledger;
mod limits;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{self, Config};
use crate::fault::{Fault, FaultKind};
use crate::identity::Identity;
use crate::protocol::{
    Control, DeviceFacts, Failure, Holder, InstanceFacts, Inventory, Kept, Limit, Memory, MemoryKind,
    Process, ProcessList, Region, Reply, Request, State,
};
use crate::size::Bytes;

pub use checkpoint::{Begun, FIRST_WITH_CHECKPOINTS};
use ledger::Ledger;
pub use limits::Cgroup;
use limits::{CgroupLimit, is_below};

/// Device memory is handed out in multiples of this.
pub const GRANULARITY: u64 = 2 << 20;

/// A connection to the driver, as the daemon numbers them.
pub type ClientId = u64;

/// The driver of one host.
#[derive(Debug)]
pub struct Driver {
    config: Config,
    devices: Vec<Device>,
    ledger: Ledger,
    faults: Vec<Injected>,
    leaving: Vec<Leaving>,
    limits: Vec<CgroupLimit>,
}

#[derive(Debug)]
struct Device {
    reserved: u64,
    facts: DeviceFacts,
}

/// Memory of a dead process that the driver has not given back yet.
#[derive(Debug)]
struct Leaving {
    region: Region,
    bytes: u64,
    until: Instant,
}

/// A fault, and the process that the lists show for it.
#[derive(Debug)]
struct Injected {
    fault: Fault,
    shown: Option<Identity>,
}

impl Driver {
    /// The driver of a host on which no process has been yet.
    pub fn new(config: Config) -> Self {
        let devices = devices(&config);
        Self {
            config,
            devices,
            ledger: Ledger::default(),
            faults: Vec::new(),
            leaving: Vec::new(),
            limits: Vec::new(),
        }
    }

    /// The host as it is configured.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A process connects.
    pub fn connect(&mut self, identity: Identity) -> ClientId {
        self.ledger.connect(identity)
    }

    /// A process is gone, however it went. Memory that nobody else holds comes back after the time
    /// that the driver takes to tear it down, unless the device is stuck.
    pub fn disconnect(&mut self, client: ClientId, now: Instant) {
        let Some((client, left)) = self.ledger.disconnect(client) else { return };
        for (region, (charged, uncharged)) in left {
            match self.stuck(region) {
                None => self.leave(region, charged + uncharged, now),
                Some(true) => {
                    let kind = FaultKind::Zombie { pid: client.identity.pid, bytes: Bytes(charged) };
                    self.faults.push(Injected {
                        fault: Fault { region, kind },
                        shown: Some(client.identity.gone()),
                    });
                    self.keep_unexplained(region, uncharged);
                }
                Some(false) => self.keep_unexplained(region, charged + uncharged),
            }
        }
    }

    /// How much longer than usual a request takes.
    pub fn delay(&self, client: ClientId, request: &Request) -> Duration {
        if self.faults.is_empty() {
            return Duration::ZERO;
        }
        let Some(region) = self.concerns(client, request) else { return Duration::ZERO };
        self.faults_at(region).map(FaultKind::delay).sum()
    }

    /// Whether every read is answered as before, at once and to each asker, for as long as nothing is
    /// changed. Not while time gives memory back, or a fault has reads differ or last; nor while
    /// there are limits, which hold for where a process is when it asks, and end with their cgroups.
    pub fn is_settled(&self) -> bool {
        self.leaving.is_empty()
            && self.limits.is_empty()
            && !self.faults.iter().any(|injected| injected.fault.kind.unsettles())
    }

    /// The region that a request is about.
    pub(crate) fn concerns(&self, client: ClientId, request: &Request) -> Option<Region> {
        match request {
            Request::Check(region)
            | Request::Memory(region)
            | Request::MemoryWithinLimits(region)
            | Request::Processes(region, _)
            | Request::CreateContext(region)
            | Request::SetLimits { region, .. }
            | Request::GetLimits { region, .. }
            | Request::Allocate { region, .. } => Some(*region),
            Request::Free(id)
            | Request::Touch { id, .. }
            | Request::Resize { id, .. }
            | Request::Export(id) => self.ledger.place(client, *id),
            Request::Open(piece) => self.ledger.piece(*piece).map(|piece| piece.region),
            Request::Epoch
            | Request::Ends
            | Request::Inventory
            | Request::Attach { .. }
            | Request::Import(_)
            | Request::ProcessState(_)
            | Request::Checkpoint { .. }
            | Request::Control(_) => None,
        }
    }

    /// Answers a request of a connected process. Whether it may change the simulator is the
    /// caller's to check; requests that need the kernel's help are [`Driver::export`],
    /// [`Driver::import`], [`Driver::set_limit`] and [`Driver::limit`].
    ///
    /// # Errors
    /// As the driver refuses it.
    pub fn answer(&mut self, client: ClientId, request: Request, now: Instant) -> Result<Reply, Failure> {
        self.leaving.retain(|leaving| leaving.until > now);
        match request {
            Request::Inventory => Ok(Reply::Inventory(self.inventory())),
            Request::Check(region) => self.reach(region).map(|()| Reply::Done),
            Request::Memory(region) => self.memory(region).map(Reply::Memory),
            Request::MemoryWithinLimits(region) => {
                self.memory_within_limits(client, region).map(Reply::Memory)
            }
            Request::Processes(region, list) => self.processes(client, region, list).map(Reply::Processes),
            Request::Attach { devices, lists } => {
                let client = self.ledger.client_mut(client).ok_or(Failure::Unknown)?;
                (client.open, client.lists) = (devices, lists);
                Ok(Reply::Done)
            }
            Request::CreateContext(region) => self.create_context(client, region).map(Reply::Made),
            Request::Allocate { region, kind, bytes, context } => {
                self.allocate(client, region, kind, bytes, context).map(Reply::Made)
            }
            Request::Touch { id, bytes } => self.touch(client, id, bytes).map(|()| Reply::Done),
            Request::Resize { id, bytes } => self.resize(client, id, bytes).map(|()| Reply::Done),
            Request::Free(id) => self.free(client, id).map(|()| Reply::Done),
            Request::Open(piece) => self.open(client, piece),
            Request::ProcessState(pid) => self.process_state(client, pid).map(Reply::ProcessState),
            Request::Control(control) => self.control(control),
            Request::Epoch
            | Request::Ends
            | Request::Export(_)
            | Request::Import(_)
            | Request::Checkpoint { .. }
            | Request::SetLimits { .. }
            | Request::GetLimits { .. } => {
                Err(Failure::Invalid("the caller forgot to ask the kernel".into()))
            }
        }
    }

    /// A descriptor is to keep an allocation of `cuMemCreate`'s; gives the number of its piece.
    ///
    /// # Errors
    /// Where the memory is of another kind, or another process's.
    pub fn export(&mut self, client: ClientId, allocation: u64) -> Result<u64, Failure> {
        let region = self.ledger.place(client, allocation).ok_or(Failure::Unknown)?;
        self.reach(region)?;
        let piece = self.ledger.made(client, allocation).ok_or(Failure::NotShareable)?;
        if piece.kind != MemoryKind::Physical {
            return Err(Failure::NotShareable);
        }
        self.ledger.export(client, allocation);
        Ok(allocation)
    }

    /// A descriptor that kept a piece is closed everywhere.
    pub fn end_export(&mut self, piece: u64) {
        self.ledger.end_export(piece);
    }

    /// A process takes a share in the piece that its descriptor keeps.
    ///
    /// # Errors
    /// Where the device is lost or the piece is gone.
    pub fn import(&mut self, client: ClientId, piece: u64) -> Result<Reply, Failure> {
        let held = self.ledger.piece(piece).ok_or(Failure::NotShareable)?;
        let (region, bytes) = (held.region, held.size);
        self.reach(region)?;
        let id = self.ledger.join(client, piece).ok_or(Failure::Unknown)?;
        Ok(Reply::Shared { id, region, bytes })
    }

    /// Whether the memory of cgroups is limited on a device.
    pub fn is_limited(&self, device: u32) -> bool {
        self.limits.iter().any(|limit| limit.device == device)
    }

    /// The cgroup of a process has been looked up.
    pub fn set_cgroup(&mut self, client: ClientId, path: &str) {
        if let Some(client) = self.ledger.client_mut(client).filter(|client| *client.cgroup != *path) {
            client.cgroup = path.into();
        }
    }

    /// Ends the limits of cgroups that are gone.
    pub fn retain_limits(&mut self, is_there: impl Fn(&Cgroup) -> bool) {
        self.limits.retain(|limit| is_there(&limit.cgroup));
    }

    /// Limits the memory of a cgroup.
    ///
    /// # Errors
    /// Where the device is cut into instances, or lost.
    pub fn set_limit(&mut self, region: Region, cgroup: Cgroup, soft: u64, hard: u64) -> Result<(), Failure> {
        self.limitable(region)?;
        self.limits.retain(|limit| limit.device != region.device || limit.cgroup.path != cgroup.path);
        if soft > 0 || hard < u64::MAX {
            self.limits.push(CgroupLimit { device: region.device, cgroup, soft, hard });
        }
        Ok(())
    }

    /// The limits of a cgroup, and what is used of them.
    ///
    /// # Errors
    /// As [`Driver::set_limit`].
    pub fn limit(&self, region: Region, cgroup: &Cgroup) -> Result<Reply, Failure> {
        self.limitable(region)?;
        let mut limits = self.limits.iter().filter(|limit| limit.device == region.device);
        let limit = limits.find(|limit| limit.cgroup == *cgroup);
        let (soft, hard) = limit.map_or((0, u64::MAX), |limit| (limit.soft, limit.hard));
        Ok(Reply::Limits { soft, hard, used: self.ledger.made_below(region.device, &cgroup.path) })
    }

    fn limitable(&self, region: Region) -> Result<(), Failure> {
        self.reach(region)?;
        let whole = self.device(region).is_some_and(|device| device.facts.instances.is_empty());
        if whole { Ok(()) } else { Err(Failure::NotSupported) }
    }

    /// Begins a fault; `shown` is the process that the lists show for its bytes.
    ///
    /// # Errors
    /// Where the region does not exist or has not that much memory free.
    pub fn inject(&mut self, fault: Fault, shown: Option<Identity>) -> Result<(), Failure> {
        self.exists(fault.region)?;
        let free = self.capacity(fault.region).saturating_sub(self.used(fault.region));
        let needed = fault.kind.held();
        if needed > free {
            let (needed, free) = (Bytes(needed), Bytes(free));
            return Err(Failure::Invalid(format!("{needed} do not fit: {free} are free there")));
        }
        if needed == 0 && fault.kind.listed().is_none() {
            // A second one of these would only repeat the first.
            self.faults.retain(|other| {
                other.fault.region != fault.region
                    || std::mem::discriminant(&other.fault.kind) != std::mem::discriminant(&fault.kind)
                    || matches!(fault.kind, FaultKind::MissingProcessMemory { .. })
            });
        }
        self.faults.push(Injected { fault, shown });
        Ok(())
    }

    /// The process of foreign faults has ended, and its memory with it.
    pub fn end_foreign(&mut self, pid: u32) {
        self.faults.retain(|injected| {
            !matches!(injected.fault.kind, FaultKind::Foreign { pid: charged, .. } if charged == pid)
        });
    }

    fn control(&mut self, control: Control) -> Result<Reply, Failure> {
        match control {
            Control::Show => Ok(Reply::State(self.state())),
            Control::Inject(fault) => self.inject(fault, None).map(|()| Reply::Done),
            Control::Clear { device, kind } => {
                let before = self.faults.len();
                self.faults.retain(|Injected { fault, .. }| {
                    device.is_some_and(|device| device != fault.region.device)
                        || kind.as_ref().is_some_and(|kind| kind != fault.kind.name())
                });
                Ok(Reply::Cleared(before - self.faults.len()))
            }
            Control::Reset { device, force } => {
                if let Some(device) = device {
                    self.exists(Region { device, instance: None })?;
                }
                self.empty(device, force).map(|()| Reply::Done)
            }
            Control::Reconfigure { config, force } => {
                // It came over the wire, so nobody has checked it yet.
                let text =
                    serde_json::to_string(&config).map_err(|error| Failure::Invalid(error.to_string()))?;
                let config = Config::from_json(&text).map_err(Failure::Invalid)?;
                self.empty(None, force)?;
                self.devices = devices(&config);
                self.config = config;
                Ok(Reply::Done)
            }
        }
    }

    /// Ends the faults and limits, and takes away the memory, of one device, or of all.
    fn empty(&mut self, device: Option<u32>, force: bool) -> Result<(), Failure> {
        let touched = |region: Region| device.is_none_or(|device| device == region.device);
        if !force && self.ledger.any(touched) {
            return Err(Failure::InUse);
        }
        self.ledger.clear(touched);
        self.faults.retain(|injected| !touched(injected.fault.region));
        self.leaving.retain(|leaving| !touched(leaving.region));
        self.limits.retain(|limit| !touched(Region { device: limit.device, instance: None }));
        Ok(())
    }

    fn create_context(&mut self, client: ClientId, region: Region) -> Result<u64, Failure> {
        let (size, overhead) = (self.config.context.0, self.config.context_overhead.0);
        self.within_limits(client, region, size)?;
        self.make_room(region, size + overhead)?;
        self.ledger.add_context(client, region, size, overhead).ok_or(Failure::Unknown)
    }

    fn allocate(
        &mut self,
        client: ClientId,
        region: Region,
        kind: MemoryKind,
        bytes: u64,
        context: Option<u64>,
    ) -> Result<u64, Failure> {
        let size = bytes.checked_next_multiple_of(GRANULARITY).ok_or(Failure::OutOfMemory)?;
        let resident = if kind == MemoryKind::Managed { 0 } else { size };
        self.within_limits(client, region, resident)?;
        self.make_room(region, resident)?;
        self.ledger.add_piece(client, (region, kind), (size, resident), context).ok_or(Failure::Unknown)
    }

    fn touch(&mut self, client: ClientId, id: u64, bytes: u64) -> Result<(), Failure> {
        let piece = self.ledger.made(client, id).ok_or(Failure::Unknown)?;
        let (region, kind, size, resident) = (piece.region, piece.kind, piece.size, piece.resident);
        let wanted = bytes.saturating_add(GRANULARITY - 1) / GRANULARITY * GRANULARITY;
        let missing = wanted.min(size).saturating_sub(resident);
        self.reach(region)?;
        if kind != MemoryKind::Managed || missing == 0 {
            return Ok(());
        }
        // What does not fit stays on the host.
        let brought = missing.min(self.capacity(region).saturating_sub(self.used(region)));
        self.ledger.resize(id, size, resident + brought);
        Ok(())
    }

    fn resize(&mut self, client: ClientId, id: u64, bytes: u64) -> Result<(), Failure> {
        let piece = self.ledger.made(client, id).ok_or(Failure::Unknown)?;
        let (region, kind, before) = (piece.region, piece.kind, piece.size);
        if kind == MemoryKind::Managed || !self.ledger.is_private(id) {
            return Err(Failure::NotShareable);
        }
        let size = bytes.checked_next_multiple_of(GRANULARITY).ok_or(Failure::OutOfMemory)?;
        let more = size.saturating_sub(before);
        self.within_limits(client, region, more)?;
        self.make_room(region, more)?;
        self.ledger.resize(id, size, size);
        Ok(())
    }

    fn free(&mut self, client: ClientId, id: u64) -> Result<(), Failure> {
        let region = self.ledger.place(client, id).ok_or(Failure::Unknown)?;
        self.reach(region)?;
        self.ledger.release(client, id);
        Ok(())
    }

    /// Another process's plain memory.
    fn open(&mut self, client: ClientId, piece: u64) -> Result<Reply, Failure> {
        let plain = self.ledger.piece(piece).is_some_and(|piece| piece.kind == MemoryKind::Plain);
        if !plain {
            return Err(Failure::NotShareable);
        }
        if self.ledger.holds(client, piece) {
            return Err(Failure::OwnMemory);
        }
        self.import(client, piece)
    }

    /// Refuses what the limits of the process's cgroup, or of one above it, do not allow.
    fn within_limits(&self, client: ClientId, region: Region, bytes: u64) -> Result<(), Failure> {
        let within = self.limits_of(client, region).all(|limit| {
            let used = self.ledger.made_below(region.device, &limit.cgroup.path);
            bytes == 0 || used.saturating_add(bytes) <= limit.hard
        });
        if within { Ok(()) } else { Err(Failure::OutOfMemory) }
    }

    /// The limits that hold for a process on a device.
    fn limits_of(&self, client: ClientId, region: Region) -> impl Iterator<Item = &CgroupLimit> {
        let cgroup: Option<Arc<str>> = self.ledger.client(client).map(|client| client.cgroup.clone());
        self.limits.iter().filter(move |limit| {
            limit.device == region.device
                && cgroup.as_ref().is_some_and(|cgroup| is_below(cgroup, &limit.cgroup.path))
        })
    }

    /// Finds `bytes` in a region; managed memory gives way to them.
    fn make_room(&mut self, region: Region, bytes: u64) -> Result<(), Failure> {
        self.reach(region)?;
        let free = self.capacity(region).saturating_sub(self.used(region));
        let mut missing = bytes.saturating_sub(free);
        if missing == 0 {
            return Ok(());
        }
        let movable: Vec<_> =
            self.ledger.managed(region).map(|(id, piece)| (id, piece.size, piece.resident)).collect();
        if missing > movable.iter().map(|(_, _, resident)| resident).sum() {
            return Err(Failure::OutOfMemory);
        }
        for (id, size, resident) in movable {
            let moved = missing.min(resident);
            if moved > 0 {
                self.ledger.resize(id, size, resident - moved);
                missing -= moved;
            }
        }
        Ok(())
    }

    fn memory(&mut self, region: Region) -> Result<Memory, Failure> {
        self.reach(region)?;
        if self.faults_at(region).any(|kind| matches!(kind, FaultKind::MissingMemory)) {
            return Err(Failure::NotSupported);
        }
        let (capacity, reserved) = (self.capacity(region), self.reserved(region));
        let torn: u64 = self
            .faults
            .iter_mut()
            .filter(|injected| injected.fault.region.covers(region))
            .map(|injected| injected.fault.kind.tear())
            .sum();
        self.faults.retain(|injected| !matches!(injected.fault.kind, FaultKind::Torn { reads: Some(0), .. }));
        let used = self.used(region).saturating_add(torn).min(capacity);
        Ok(Memory { total: capacity + reserved, reserved, used, free: capacity - used })
    }

    /// Memory as a process in a limited cgroup is to see it: the limit is the whole of it.
    fn memory_within_limits(&mut self, client: ClientId, region: Region) -> Result<Memory, Failure> {
        let mut memory = self.memory(region)?;
        let mut limits = Vec::new();
        for limit in self.limits_of(client, region).filter(|limit| limit.hard < u64::MAX) {
            limits.push((limit.hard, self.ledger.made_below(region.device, &limit.cgroup.path)));
        }
        for (hard, used) in limits {
            if hard < memory.total - memory.reserved {
                let free = memory.free.min(hard.saturating_sub(used));
                memory = Memory { total: hard, reserved: 0, used: hard - free, free };
            }
        }
        Ok(memory)
    }

    fn processes(
        &self,
        client: ClientId,
        region: Region,
        list: ProcessList,
    ) -> Result<Vec<Process>, Failure> {
        self.reach(region)?;
        let viewer = self.ledger.client(client).ok_or(Failure::Unknown)?.identity.namespace();
        let mut shown: BTreeMap<(u32, Region), (&Identity, u64)> = BTreeMap::new();
        let mut show = |identity, at, bytes| {
            shown.entry((Identity::pid(identity), at)).or_insert((identity, 0)).1 += bytes;
        };
        for (identity, at, bytes) in self.ledger.charges(region, list) {
            show(identity, at, bytes);
        }
        for Injected { fault, shown: identity } in &self.faults {
            let listed = fault.kind.listed().is_some_and(|(_, on)| on == list);
            if let Some(identity) = identity.as_ref().filter(|_| listed && region.covers(fault.region)) {
                show(identity, fault.region, fault.kind.held());
            }
        }
        let visible = shown.into_iter().filter_map(|((host_pid, at), (identity, bytes))| {
            Some(Process {
                pid: identity.pid_in(viewer)?,
                bytes: Some(bytes).filter(|_| !self.hides(at, host_pid)),
                instance: self.instance(at).map(|facts| (facts.gpu_instance, facts.compute_instance)),
            })
        });
        Ok(visible.collect())
    }

    /// Whether a fault keeps back the number of bytes of a process.
    fn hides(&self, region: Region, host_pid: u32) -> bool {
        self.faults_at(region).any(|kind| {
            matches!(kind, FaultKind::MissingProcessMemory { pid } if pid.is_none_or(|pid| pid == host_pid))
        })
    }

    fn state(&self) -> State {
        let holders = self.ledger.summaries().into_iter().map(|((pid, region), summary)| Holder {
            pid,
            region,
            contexts: summary.contexts,
            charged: summary.charged,
            uncharged: summary.uncharged,
        });
        let memory = (0..).zip(&self.devices).map(|(device, _)| {
            let region = Region { device, instance: None };
            let (capacity, reserved, used) =
                (self.capacity(region), self.reserved(region), self.used(region));
            Some(Memory { total: capacity + reserved, reserved, used, free: capacity.saturating_sub(used) })
        });
        let kept = self.ledger.kept().into_iter();
        let limits = self.limits.iter().map(|limit| Limit {
            device: limit.device,
            path: limit.cgroup.path.to_string(),
            soft: limit.soft,
            hard: limit.hard,
            used: self.ledger.made_below(limit.device, &limit.cgroup.path),
        });
        State {
            inventory: self.inventory(),
            memory: memory.collect(),
            holders: holders.collect(),
            stopped: self.stopped(),
            kept: kept.map(|(region, (chunks, bytes))| Kept { region, chunks, bytes }).collect(),
            leaving: Bytes(self.leaving.iter().map(|leaving| leaving.bytes).sum()),
            limits: limits.collect(),
            faults: self.faults.iter().map(|injected| injected.fault.clone()).collect(),
        }
    }

    fn inventory(&self) -> Inventory {
        Inventory {
            driver_version: self.config.driver_version.clone(),
            cuda_version: self.config.cuda_version,
            devices: self.devices.iter().map(|device| device.facts.clone()).collect(),
        }
    }

    /// Bytes in use in a region, by whomever.
    fn used(&self, region: Region) -> u64 {
        let leaving = self.leaving.iter().filter(|leaving| region.covers(leaving.region)).map(|l| l.bytes);
        let faults = self.faults.iter().map(|injected| &injected.fault);
        let faults = faults.filter(|fault| region.covers(fault.region)).map(|fault| fault.kind.held());
        let open = region.instance.is_none() && self.ledger.is_open(region.device);
        let open = open.then_some(self.config.open_overhead.0);
        leaving.chain(faults).chain(open).fold(self.ledger.used(region), u64::saturating_add)
    }

    /// Bytes that a region can hold.
    fn capacity(&self, region: Region) -> u64 {
        match self.instance(region) {
            Some(instance) => instance.usable,
            None => self.device(region).map_or(0, |device| device.facts.usable),
        }
    }

    /// Bytes of a region that the driver keeps.
    fn reserved(&self, region: Region) -> u64 {
        self.device(region).filter(|_| region.instance.is_none()).map_or(0, |device| device.reserved)
    }

    /// Fails where the region does not exist or its device is lost.
    fn reach(&self, region: Region) -> Result<(), Failure> {
        self.exists(region)?;
        let lost = self.faults_at(region).any(|kind| matches!(kind, FaultKind::Lost));
        if lost { Err(Failure::Lost) } else { Ok(()) }
    }

    fn exists(&self, region: Region) -> Result<(), Failure> {
        let there = match region.instance {
            Some(_) => self.instance(region).is_some(),
            None => self.device(region).is_some(),
        };
        if there { Ok(()) } else { Err(Failure::Unknown) }
    }

    /// Whether memory of dead processes stays, and if so, whether they stay in the lists.
    fn stuck(&self, region: Region) -> Option<bool> {
        self.faults_at(region).find_map(|kind| match kind {
            FaultKind::Stuck { listed } => Some(*listed),
            _ => None,
        })
    }

    fn keep_unexplained(&mut self, region: Region, bytes: u64) {
        if bytes > 0 {
            let fault = Fault { region, kind: FaultKind::Unexplained { bytes: Bytes(bytes) } };
            self.faults.push(Injected { fault, shown: None });
        }
    }

    fn leave(&mut self, region: Region, bytes: u64, now: Instant) {
        let rate = u128::from(self.config.teardown_microseconds_per_gibibyte);
        let microseconds = (u128::from(bytes) * rate) >> 30;
        let until = now + Duration::from_micros(u64::try_from(microseconds).unwrap_or(u64::MAX));
        self.leaving.push(Leaving { region, bytes, until });
    }

    fn faults_at(&self, region: Region) -> impl Iterator<Item = &FaultKind> {
        let faults = self.faults.iter().map(|injected| &injected.fault);
        faults.filter(move |fault| fault.region.covers(region)).map(|fault| &fault.kind)
    }

    fn device(&self, region: Region) -> Option<&Device> {
        self.devices.get(usize::try_from(region.device).ok()?)
    }

    fn instance(&self, region: Region) -> Option<&InstanceFacts> {
        self.device(region)?.facts.instances.get(usize::try_from(region.instance?).ok()?)
    }
}

fn devices(config: &Config) -> Vec<Device> {
    let device = |(index, device): (u32, &config::DeviceConfig)| {
        let instances = device.mig.iter().map(|instance| InstanceFacts {
            uuid: config::uuid(
                "MIG",
                &config.seed,
                &[index, instance.gpu_instance, instance.compute_instance],
            ),
            name: format!("{} MIG {}", device.name, instance.profile),
            usable: instance.memory.0,
            gpu_instance: instance.gpu_instance,
            compute_instance: instance.compute_instance,
        });
        let facts = DeviceFacts {
            uuid: config::uuid("GPU", &config.seed, &[index]),
            name: device.name.clone(),
            bus: index + 1,
            usable: device.memory.0 - device.reserved.0,
            instances: instances.collect(),
        };
        Device { reserved: device.reserved.0, facts }
    };
    (0..).zip(config.each_device()).map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceConfig, InstanceConfig};

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    const WHOLE: Region = Region { device: 0, instance: None };
    const HOST: u64 = 1;

    fn process(pid: u32) -> Identity {
        Identity { pid, namespaces: vec![(HOST, pid)] }
    }

    fn driver(devices: Vec<DeviceConfig>) -> Driver {
        let none = Bytes(0);
        Driver::new(Config { devices, context_overhead: none, open_overhead: none, ..Config::default() })
    }

    fn h200() -> Driver {
        driver(vec![DeviceConfig::default()])
    }

    /// Asks, and expects the driver to agree.
    fn ask(driver: &mut Driver, client: ClientId, request: Request, now: Instant) -> Reply {
        driver.answer(client, request, now).unwrap()
    }

    fn made(reply: &Reply) -> u64 {
        let Reply::Made(id) = reply else { panic!("{reply:?}") };
        *id
    }

    fn attach(driver: &mut Driver, client: ClientId, lists: Vec<ProcessList>) {
        ask(driver, client, Request::Attach { devices: vec![0], lists }, Instant::now());
    }

    fn context(driver: &mut Driver, client: ClientId) -> u64 {
        attach(driver, client, vec![ProcessList::Compute]);
        made(&ask(driver, client, Request::CreateContext(WHOLE), Instant::now()))
    }

    fn allocate(driver: &mut Driver, client: ClientId, kind: MemoryKind, bytes: u64) -> Result<u64, Failure> {
        let request = Request::Allocate { region: WHOLE, kind, bytes, context: None };
        driver.answer(client, request, Instant::now()).map(|reply| made(&reply))
    }

    fn memory(driver: &mut Driver, client: ClientId, now: Instant) -> Memory {
        let Reply::Memory(memory) = ask(driver, client, Request::Memory(WHOLE), now) else { panic!() };
        assert_eq!(memory.total, memory.reserved + memory.used + memory.free);
        memory
    }

    fn used(driver: &mut Driver, client: ClientId) -> u64 {
        memory(driver, client, Instant::now()).used
    }

    fn listed(
        driver: &mut Driver,
        client: ClientId,
        region: Region,
        list: ProcessList,
    ) -> Vec<(u32, Option<u64>)> {
        let request = Request::Processes(region, list);
        let Reply::Processes(list) = ask(driver, client, request, Instant::now()) else { panic!() };
        list.into_iter().map(|process| (process.pid, process.bytes)).collect()
    }

    fn compute(driver: &mut Driver, client: ClientId) -> Vec<(u32, Option<u64>)> {
        listed(driver, client, WHOLE, ProcessList::Compute)
    }

    fn inject(driver: &mut Driver, kind: FaultKind) {
        driver.inject(Fault { region: WHOLE, kind }, None).unwrap();
    }

    #[test]
    fn a_context_costs_518_mib_and_makes_the_process_visible() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        assert_eq!(compute(&mut driver, client), []);
        let context = context(&mut driver, client);
        assert_eq!(compute(&mut driver, client), [(10, Some(518 * MIB))]);
        assert_eq!(used(&mut driver, client), 518 * MIB);
        ask(&mut driver, client, Request::Free(context), Instant::now());
        assert_eq!(compute(&mut driver, client), []);
        assert_eq!(used(&mut driver, client), 0);
    }

    #[test]
    fn reads_are_settled_unless_time_or_a_read_or_the_reader_makes_a_difference() {
        let mut driver = h200();
        let (client, now) = (driver.connect(process(10)), Instant::now());
        context(&mut driver, client);
        for (kind, settled) in [
            (FaultKind::Lost, true),
            (FaultKind::Unexplained { bytes: Bytes(MIB) }, true),
            (FaultKind::Slow { milliseconds: 1 }, false),
            (FaultKind::Torn { bytes: Bytes(MIB), reads: None, raised: false }, false),
        ] {
            assert!(driver.is_settled());
            inject(&mut driver, kind.clone());
            assert_eq!(driver.is_settled(), settled, "{kind:?}");
            ask(&mut driver, client, Request::Control(Control::Clear { device: None, kind: None }), now);
        }

        let cgroup = || Cgroup { path: "/pod".into(), inode: 1 };
        driver.set_limit(WHOLE, cgroup(), 0, GIB).unwrap();
        assert!(!driver.is_settled());
        driver.set_limit(WHOLE, cgroup(), 0, u64::MAX).unwrap();
        assert!(driver.is_settled());

        let other = driver.connect(process(11));
        driver.disconnect(client, now);
        assert!(!driver.is_settled(), "memory is still to come back");
        memory(&mut driver, other, now + Duration::from_hours(1));
        assert!(driver.is_settled());
    }

    #[test]
    fn memory_is_charged_in_steps_of_2_mib() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        context(&mut driver, client);
        allocate(&mut driver, client, MemoryKind::Plain, 1).unwrap();
        allocate(&mut driver, client, MemoryKind::Plain, 3 * MIB).unwrap();
        assert_eq!(compute(&mut driver, client), [(10, Some(524 * MIB))]);
    }

    #[test]
    fn the_end_of_a_context_frees_what_was_made_in_it() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        let context = context(&mut driver, client);
        let request =
            Request::Allocate { region: WHOLE, kind: MemoryKind::Plain, bytes: GIB, context: Some(context) };
        ask(&mut driver, client, request, Instant::now());
        ask(&mut driver, client, Request::Free(context), Instant::now());
        assert_eq!(used(&mut driver, client), 0);
    }

    #[test]
    fn a_full_device_refuses_and_stays_exact() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        context(&mut driver, client);
        let free = memory(&mut driver, client, Instant::now()).free;
        assert_eq!(allocate(&mut driver, client, MemoryKind::Plain, free + 1), Err(Failure::OutOfMemory));
        assert_eq!(allocate(&mut driver, client, MemoryKind::Plain, u64::MAX), Err(Failure::OutOfMemory));
        allocate(&mut driver, client, MemoryKind::Plain, free - free % GRANULARITY).unwrap();
        assert_eq!(memory(&mut driver, client, Instant::now()).free, free % GRANULARITY);
    }

    #[test]
    fn managed_memory_is_used_when_touched_and_charged_to_nobody() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        context(&mut driver, client);
        let id = allocate(&mut driver, client, MemoryKind::Managed, 4 * GIB).unwrap();
        assert_eq!(used(&mut driver, client), 518 * MIB);
        ask(&mut driver, client, Request::Touch { id, bytes: 4 * GIB }, Instant::now());
        assert_eq!(used(&mut driver, client), 518 * MIB + 4 * GIB);
        assert_eq!(compute(&mut driver, client), [(10, Some(518 * MIB))]);
    }

    #[test]
    fn managed_memory_gives_way_to_plain_memory() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        let id = allocate(&mut driver, client, MemoryKind::Managed, 200 * GIB).unwrap();
        ask(&mut driver, client, Request::Touch { id, bytes: 200 * GIB }, Instant::now());
        assert_eq!(memory(&mut driver, client, Instant::now()).free, 0);
        allocate(&mut driver, client, MemoryKind::Plain, 8 * GIB).unwrap();
        assert_eq!(memory(&mut driver, client, Instant::now()).free, 0);
    }

    #[test]
    fn memory_made_without_a_context_is_charged_from_the_context_on() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        allocate(&mut driver, client, MemoryKind::Physical, GIB).unwrap();
        assert_eq!(compute(&mut driver, client), []);
        assert_eq!(used(&mut driver, client), GIB);
        context(&mut driver, client);
        assert_eq!(compute(&mut driver, client), [(10, Some(518 * MIB + GIB))]);
    }

    #[test]
    fn what_a_device_in_use_costs_besides_is_charged_to_nobody() {
        let mut driver = Driver::new(Config::default());
        let (one, two) = (driver.connect(process(10)), driver.connect(process(20)));
        assert_eq!(used(&mut driver, one), 0);
        context(&mut driver, one);
        let residual = |driver: &mut Driver| {
            let charged: u64 = compute(driver, one).iter().filter_map(|(_, bytes)| *bytes).sum();
            used(driver, one) - charged
        };
        // As measured with one process and with two: 8.81 and 14.38 MiB.
        assert_eq!(residual(&mut driver) >> 10, 9_024);
        context(&mut driver, two);
        assert_eq!(residual(&mut driver) >> 10, 14_720);
    }

    #[test]
    fn sixty_gib_of_a_dead_process_come_back_after_146_ms() {
        let mut driver = h200();
        let (watcher, victim) = (driver.connect(process(1)), driver.connect(process(10)));
        allocate(&mut driver, victim, MemoryKind::Plain, 60 * GIB).unwrap();
        let death = Instant::now();
        driver.disconnect(victim, death);
        assert_eq!(compute(&mut driver, watcher), []);
        assert_eq!(memory(&mut driver, watcher, death + Duration::from_millis(145)).used, 60 * GIB);
        assert_eq!(memory(&mut driver, watcher, death + Duration::from_millis(147)).used, 0);
    }

    #[test]
    fn processes_are_shown_by_the_pid_that_the_viewer_knows() {
        let mut driver = h200();
        let inner = Identity { pid: 200, namespaces: vec![(2, 7), (HOST, 200)] };
        let (host, pod) = (driver.connect(process(10)), driver.connect(inner));
        context(&mut driver, host);
        context(&mut driver, pod);
        let bytes = Some(518 * MIB);
        assert_eq!(compute(&mut driver, host), [(10, bytes), (200, bytes)]);
        assert_eq!(compute(&mut driver, pod), [(7, bytes)]);
    }

    #[test]
    fn a_process_is_shown_on_its_own_lists_only() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        context(&mut driver, client);
        attach(&mut driver, client, vec![ProcessList::Mps, ProcessList::Graphics]);
        assert_eq!(compute(&mut driver, client), []);
        assert_eq!(listed(&mut driver, client, WHOLE, ProcessList::Mps).len(), 1);
        assert_eq!(listed(&mut driver, client, WHOLE, ProcessList::Graphics).len(), 1);
    }

    #[test]
    fn a_mig_instance_has_its_own_memory_and_the_device_shows_all() {
        let instance = |gpu_instance| InstanceConfig {
            profile: "1g.18gb".into(),
            memory: Bytes(16 * GIB),
            gpu_instance,
            compute_instance: 0,
        };
        let mig = vec![instance(7), instance(8)];
        let mut driver = driver(vec![DeviceConfig { mig, ..DeviceConfig::default() }]);
        let client = driver.connect(process(10));
        let second = Region { device: 0, instance: Some(1) };
        attach(&mut driver, client, vec![ProcessList::Compute]);
        ask(&mut driver, client, Request::CreateContext(second), Instant::now());
        let request =
            Request::Allocate { region: second, kind: MemoryKind::Plain, bytes: 16 * GIB, context: None };
        assert_eq!(driver.answer(client, request, Instant::now()), Err(Failure::OutOfMemory));

        let Reply::Memory(memory) = ask(&mut driver, client, Request::Memory(second), Instant::now()) else {
            panic!()
        };
        assert_eq!((memory.total, memory.used), (16 * GIB, 518 * MIB));
        assert_eq!(used(&mut driver, client), 518 * MIB);
        let request = Request::Processes(WHOLE, ProcessList::Compute);
        let Reply::Processes(list) = ask(&mut driver, client, request, Instant::now()) else { panic!() };
        assert_eq!(list, [Process { pid: 10, bytes: Some(518 * MIB), instance: Some((8, 0)) }]);
        let first = Region { device: 0, instance: Some(0) };
        assert_eq!(listed(&mut driver, client, first, ProcessList::Compute), []);
    }

    #[test]
    fn a_lost_device_fails_every_call_and_the_others_go_on() {
        let mut driver = driver(vec![DeviceConfig { count: 2, ..DeviceConfig::default() }]);
        let client = driver.connect(process(10));
        let context = context(&mut driver, client);
        inject(&mut driver, FaultKind::Lost);
        for request in [
            Request::Check(WHOLE),
            Request::Memory(WHOLE),
            Request::Processes(WHOLE, ProcessList::Compute),
            Request::CreateContext(WHOLE),
            Request::Free(context),
        ] {
            assert_eq!(driver.answer(client, request, Instant::now()), Err(Failure::Lost));
        }
        let other = Region { device: 1, instance: None };
        ask(&mut driver, client, Request::Memory(other), Instant::now());
    }

    #[test]
    fn missing_numbers_are_missing() {
        let mut driver = h200();
        let (one, two) = (driver.connect(process(10)), driver.connect(process(20)));
        context(&mut driver, one);
        context(&mut driver, two);
        inject(&mut driver, FaultKind::MissingProcessMemory { pid: Some(20) });
        assert_eq!(compute(&mut driver, one), [(10, Some(518 * MIB)), (20, None)]);
        inject(&mut driver, FaultKind::MissingMemory);
        assert_eq!(driver.answer(one, Request::Memory(WHOLE), Instant::now()), Err(Failure::NotSupported));
        let clear = Control::Clear { device: Some(0), kind: None };
        assert_eq!(ask(&mut driver, one, Request::Control(clear), Instant::now()), Reply::Cleared(2));
        assert_eq!(used(&mut driver, one), 2 * 518 * MIB);
    }

    #[test]
    fn foreign_and_zombie_memory_is_listed_and_unexplained_memory_is_not() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        let foreign = FaultKind::Foreign { pid: 30, bytes: Bytes(GIB), list: ProcessList::Graphics };
        driver.inject(Fault { region: WHOLE, kind: foreign }, Some(process(30))).unwrap();
        let zombie = FaultKind::Zombie { pid: 40, bytes: Bytes(2 * GIB) };
        driver.inject(Fault { region: WHOLE, kind: zombie }, Some(process(40))).unwrap();
        inject(&mut driver, FaultKind::Unexplained { bytes: Bytes(4 * GIB) });
        assert_eq!(listed(&mut driver, client, WHOLE, ProcessList::Graphics), [(30, Some(GIB))]);
        assert_eq!(compute(&mut driver, client), [(40, Some(2 * GIB))]);
        assert_eq!(used(&mut driver, client), 7 * GIB);
        driver.end_foreign(30);
        assert_eq!(used(&mut driver, client), 6 * GIB);
        let kind = FaultKind::Unexplained { bytes: Bytes(200 * GIB) };
        assert!(driver.inject(Fault { region: WHOLE, kind }, None).is_err());
    }

    #[test]
    fn a_torn_read_differs_from_the_one_before_it() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        inject(&mut driver, FaultKind::Torn { bytes: Bytes(GIB), reads: Some(2), raised: false });
        let reads: Vec<_> = (0..6).map(|_| used(&mut driver, client)).collect();
        assert_eq!(reads, [0, GIB, 0, GIB, 0, 0]);
    }

    #[test]
    fn a_slow_device_delays_its_own_calls_only() {
        let mut driver = driver(vec![DeviceConfig { count: 2, ..DeviceConfig::default() }]);
        let client = driver.connect(process(10));
        inject(&mut driver, FaultKind::Slow { milliseconds: 50 });
        let other = Region { device: 1, instance: None };
        assert_eq!(driver.delay(client, &Request::Memory(WHOLE)), Duration::from_millis(50));
        assert_eq!(driver.delay(client, &Request::Memory(other)), Duration::ZERO);
        assert_eq!(driver.delay(client, &Request::Inventory), Duration::ZERO);
    }

    #[test]
    fn memory_on_a_stuck_device_outlives_its_process_until_the_reset() {
        for (stays_listed, entries) in [(true, 1), (false, 0)] {
            let mut driver = h200();
            let (watcher, victim) = (driver.connect(process(1)), driver.connect(process(10)));
            context(&mut driver, victim);
            allocate(&mut driver, victim, MemoryKind::Plain, 4 * GIB).unwrap();
            inject(&mut driver, FaultKind::Stuck { listed: stays_listed });
            let death = Instant::now();
            driver.disconnect(victim, death);
            let later = death + Duration::from_mins(1);
            assert_eq!(memory(&mut driver, watcher, later).used, 4 * GIB + 518 * MIB);
            assert_eq!(compute(&mut driver, watcher).len(), entries);
            let reset = Control::Reset { device: Some(0), force: false };
            ask(&mut driver, watcher, Request::Control(reset), later);
            assert_eq!(memory(&mut driver, watcher, later).used, 0);
        }
    }

    #[test]
    fn a_device_in_use_is_reset_by_force_only() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        let context = context(&mut driver, client);
        let reset = |force| Request::Control(Control::Reset { device: None, force });
        assert_eq!(driver.answer(client, reset(false), Instant::now()), Err(Failure::InUse));
        ask(&mut driver, client, reset(true), Instant::now());
        assert_eq!(used(&mut driver, client), 0);
        assert_eq!(driver.answer(client, Request::Free(context), Instant::now()), Err(Failure::Unknown));
    }

    fn physical(driver: &mut Driver, client: ClientId, bytes: u64) -> u64 {
        allocate(driver, client, MemoryKind::Physical, bytes).unwrap()
    }

    fn shared(driver: &mut Driver, client: ClientId, piece: u64) -> u64 {
        let Reply::Shared { id, .. } = driver.import(client, piece).unwrap() else { panic!() };
        id
    }

    #[test]
    fn a_piece_is_charged_to_its_exporter_and_then_to_an_importer() {
        let mut driver = h200();
        let (maker, first, second) =
            (driver.connect(process(10)), driver.connect(process(20)), driver.connect(process(30)));
        for client in [maker, first, second] {
            context(&mut driver, client);
        }
        let context = Some(518 * MIB);
        let with = Some(518 * MIB + GIB);
        let piece = physical(&mut driver, maker, GIB);
        driver.export(maker, piece).unwrap();
        let share = shared(&mut driver, first, piece);
        shared(&mut driver, second, piece);
        assert_eq!(compute(&mut driver, maker), [(10, with), (20, context), (30, context)]);
        ask(&mut driver, maker, Request::Free(piece), Instant::now());
        assert_eq!(compute(&mut driver, maker), [(10, context), (20, with), (30, context)]);
        ask(&mut driver, first, Request::Free(share), Instant::now());
        assert_eq!(compute(&mut driver, maker), [(10, context), (20, context), (30, with)]);
        driver.disconnect(second, Instant::now());
        assert_eq!(compute(&mut driver, maker), [(10, context), (20, context)]);
        assert_eq!(memory(&mut driver, maker, later()).used, 2 * 518 * MIB + GIB, "the descriptor keeps it");
        driver.end_export(piece);
        assert_eq!(memory(&mut driver, maker, later()).used, 2 * 518 * MIB);
    }

    /// When everything that was torn down is back.
    fn later() -> Instant {
        Instant::now() + Duration::from_mins(1)
    }

    #[test]
    fn a_piece_that_was_shared_without_a_context_is_never_charged() {
        let mut driver = h200();
        let (maker, taker) = (driver.connect(process(10)), driver.connect(process(20)));
        let piece = physical(&mut driver, maker, GIB);
        driver.export(maker, piece).unwrap();
        context(&mut driver, taker);
        shared(&mut driver, taker, piece);
        assert_eq!(compute(&mut driver, taker), [(20, Some(518 * MIB))]);
        driver.disconnect(maker, Instant::now());
        driver.end_export(piece);
        assert_eq!(compute(&mut driver, taker), [(20, Some(518 * MIB))]);
        assert_eq!(used(&mut driver, taker), 518 * MIB + GIB);
        driver.disconnect(taker, Instant::now());
        let watcher = driver.connect(process(1));
        assert_eq!(memory(&mut driver, watcher, later()).used, 0);
    }

    #[test]
    fn only_physical_memory_of_one_s_own_can_be_exported() {
        let mut driver = h200();
        let (maker, taker) = (driver.connect(process(10)), driver.connect(process(20)));
        context(&mut driver, maker);
        let plain = allocate(&mut driver, maker, MemoryKind::Plain, GIB).unwrap();
        assert_eq!(driver.export(maker, plain), Err(Failure::NotShareable));
        let piece = physical(&mut driver, maker, GIB);
        driver.export(maker, piece).unwrap();
        let share = shared(&mut driver, taker, piece);
        assert_eq!(driver.export(taker, share), Err(Failure::NotShareable));
        assert_eq!(driver.export(taker, piece), Err(Failure::Unknown));
        let open = |driver: &mut Driver, client, id| driver.answer(client, Request::Open(id), Instant::now());
        assert_eq!(open(&mut driver, taker, piece), Err(Failure::NotShareable));
        assert_eq!(open(&mut driver, maker, plain), Err(Failure::OwnMemory));
        assert!(open(&mut driver, taker, plain).is_ok());
        let resize = Request::Resize { id: plain, bytes: 2 * GIB };
        assert_eq!(driver.answer(maker, resize, Instant::now()), Err(Failure::NotShareable));
    }

    #[test]
    fn an_allocation_can_change_its_size() {
        let mut driver = h200();
        let client = driver.connect(process(10));
        context(&mut driver, client);
        let id = allocate(&mut driver, client, MemoryKind::Plain, GIB).unwrap();
        let resize = |bytes| Request::Resize { id, bytes };
        ask(&mut driver, client, resize(3 * GIB + 1), Instant::now());
        assert_eq!(compute(&mut driver, client), [(10, Some(518 * MIB + 3 * GIB + GRANULARITY))]);
        assert_eq!(driver.answer(client, resize(900 * GIB), Instant::now()), Err(Failure::OutOfMemory));
        ask(&mut driver, client, resize(GIB), Instant::now());
        assert_eq!(used(&mut driver, client), 518 * MIB + GIB);
    }

    #[test]
    fn a_limit_holds_for_a_cgroup_with_all_below_it() {
        let mut driver = h200();
        let (inside, below, outside) =
            (driver.connect(process(10)), driver.connect(process(20)), driver.connect(process(30)));
        for (client, path) in [(inside, "/pods/a"), (below, "/pods/a/c"), (outside, "/pods/ab")] {
            driver.set_cgroup(client, path);
            context(&mut driver, client);
        }
        let cgroup = Cgroup { path: "/pods/a".into(), inode: 7 };
        driver.set_limit(WHOLE, cgroup.clone(), 0, 4 * GIB).unwrap();
        let contexts = 2 * 518 * MIB;
        let take = |driver: &mut Driver, client, kind, bytes| allocate(driver, client, kind, bytes);
        take(&mut driver, inside, MemoryKind::Plain, GIB).unwrap();
        take(&mut driver, below, MemoryKind::Physical, GIB).unwrap();
        let left = 4 * GIB - 2 * GIB - contexts;
        let refused = Err(Failure::OutOfMemory);
        assert_eq!(take(&mut driver, inside, MemoryKind::Plain, left + 1), refused);
        assert_eq!(take(&mut driver, below, MemoryKind::Physical, left + 1), refused);
        take(&mut driver, inside, MemoryKind::Managed, 100 * GIB).unwrap();
        take(&mut driver, outside, MemoryKind::Plain, 100 * GIB).unwrap();
        let seen = |driver: &mut Driver, client| {
            let Reply::Memory(memory) =
                ask(driver, client, Request::MemoryWithinLimits(WHOLE), Instant::now())
            else {
                panic!()
            };
            (memory.total - memory.reserved, memory.free)
        };
        assert_eq!(seen(&mut driver, below), (4 * GIB, left));
        assert!(seen(&mut driver, outside).0 > 100 * GIB);
        let limits = driver.limit(WHOLE, &cgroup).unwrap();
        assert_eq!(limits, Reply::Limits { soft: 0, hard: 4 * GIB, used: 2 * GIB + contexts });
        driver.disconnect(below, Instant::now());
        let limits = driver.limit(WHOLE, &cgroup).unwrap();
        assert_eq!(limits, Reply::Limits { soft: 0, hard: 4 * GIB, used: GIB + 518 * MIB });
        let later = Cgroup { inode: 8, ..cgroup };
        let limits = driver.limit(WHOLE, &later).unwrap();
        assert_eq!(limits, Reply::Limits { soft: 0, hard: u64::MAX, used: GIB + 518 * MIB });
        driver.retain_limits(|cgroup| cgroup.inode == 8);
        assert!(!driver.is_limited(0));
        take(&mut driver, inside, MemoryKind::Plain, 4 * GIB).unwrap();
    }

    /// Whatever happens in whatever order, the sums are those of what is held, and nothing is left
    /// when everything has been given back.
    #[test]
    fn the_sums_are_right_after_any_history() {
        for mut seed in 1..200_u64 {
            let mut next = |below: u64| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed % below
            };
            let mut driver = h200();
            let mut clients: Vec<ClientId> = Vec::new();
            let mut holdings: Vec<(ClientId, u64)> = Vec::new();
            let mut contexts: Vec<u64> = Vec::new();
            let mut descriptors: Vec<u64> = Vec::new();
            for step in 0..120 {
                let now = Instant::now();
                if clients.is_empty() || (next(10) == 0 && clients.len() < 6) {
                    let client = driver.connect(process(u32::try_from(step + 1).unwrap()));
                    driver.set_cgroup(client, ["/a", "/a/b", "/c"][usize::try_from(next(3)).unwrap()]);
                    attach(&mut driver, client, vec![ProcessList::Compute]);
                    clients.push(client);
                }
                let any = |next: &mut dyn FnMut(u64) -> u64, length: usize| {
                    usize::try_from(next(u64::try_from(length).unwrap())).unwrap()
                };
                let client = clients[any(&mut next, clients.len())];
                match next(9) {
                    0 => {
                        let id = made(&ask(&mut driver, client, Request::CreateContext(WHOLE), now));
                        contexts.push(id);
                        holdings.push((client, id));
                    }
                    1..=3 => {
                        let kinds = [MemoryKind::Plain, MemoryKind::Physical, MemoryKind::Managed];
                        let kind = kinds[any(&mut next, 3)];
                        let context =
                            holdings.iter().find(|(owner, id)| *owner == client && contexts.contains(id));
                        let context = context.map(|(_, id)| *id).filter(|_| kind != MemoryKind::Physical);
                        let bytes = next(64 * MIB) + 1;
                        let request = Request::Allocate { region: WHOLE, kind, bytes, context };
                        let id = made(&driver.answer(client, request, now).unwrap());
                        if kind == MemoryKind::Managed {
                            ask(&mut driver, client, Request::Touch { id, bytes: bytes / 2 }, now);
                        }
                        holdings.push((client, id));
                    }
                    4 if !holdings.is_empty() => {
                        let (client, id) = holdings[any(&mut next, holdings.len())];
                        if driver.export(client, id).is_ok() {
                            descriptors.push(id);
                        }
                    }
                    5 if !descriptors.is_empty() => {
                        let piece = descriptors[any(&mut next, descriptors.len())];
                        if let Ok(Reply::Shared { id, .. }) = driver.import(client, piece) {
                            holdings.push((client, id));
                        }
                    }
                    6 if !descriptors.is_empty() => {
                        let piece = descriptors.swap_remove(any(&mut next, descriptors.len()));
                        driver.end_export(piece);
                    }
                    7 if !holdings.is_empty() => {
                        let (client, id) = holdings.swap_remove(any(&mut next, holdings.len()));
                        // What a context took with it is gone already.
                        let _ = driver.answer(client, Request::Free(id), now);
                    }
                    8 if next(4) == 0 => {
                        driver.disconnect(client, now);
                        clients.retain(|other| *other != client);
                        holdings.retain(|(owner, _)| *owner != client);
                    }
                    _ => {}
                }
                driver.leaving.clear();
                check_sums(&mut driver);
            }
            for client in clients {
                driver.disconnect(client, Instant::now());
            }
            for piece in descriptors {
                driver.end_export(piece);
            }
            driver.leaving.clear();
            check_sums(&mut driver);
            assert_eq!(driver.ledger.used(WHOLE), 0);
            assert_eq!(driver.ledger.made_below(0, "/"), 0);
        }
    }

    fn check_sums(driver: &mut Driver) {
        let state = driver.state();
        let held: u64 = state.holders.iter().map(|holder| holder.charged + holder.uncharged).sum();
        let kept: u64 = state.kept.iter().map(|kept| kept.bytes).sum();
        assert_eq!(driver.ledger.used(WHOLE), held + kept);
        let listed = driver.ledger.charges(WHOLE, ProcessList::Compute);
        let listed: Vec<_> = listed.into_iter().map(|(identity, _, bytes)| (identity.pid, bytes)).collect();
        let expected = state.holders.iter().filter(|holder| holder.contexts > 0);
        let expected: Vec<_> = expected.map(|holder| (holder.pid, holder.charged)).collect();
        assert_eq!(listed, expected);
        let managed: u64 = driver.ledger.managed(WHOLE).map(|(_, piece)| piece.resident).sum();
        assert_eq!(driver.ledger.made_below(0, "/"), driver.ledger.used(WHOLE) - managed);
    }
}
