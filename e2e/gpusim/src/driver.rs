//! The behaviour of the driver: who holds which memory, and what the libraries may see of it.
//!
//! Knows no sockets, processes or clocks: callers bring the identity of the process that asks and
//! the time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::config::{self, Config};
use crate::fault::{Fault, FaultKind};
use crate::identity::Identity;
use crate::protocol::{
    Control, DeviceFacts, Failure, Holder, InstanceFacts, Inventory, Memory, MemoryKind, Process,
    ProcessList, Region, Reply, Request, State,
};
use crate::size::Bytes;

/// Device memory is handed out in multiples of this.
pub const GRANULARITY: u64 = 2 << 20;

/// A connection to the driver, as the daemon numbers them.
pub type ClientId = u64;

/// The driver of one host.
#[derive(Debug)]
pub struct Driver {
    config: Config,
    devices: Vec<Device>,
    clients: BTreeMap<ClientId, Client>,
    faults: Vec<Injected>,
    leaving: Vec<Leaving>,
    last_id: u64,
}

#[derive(Debug)]
struct Device {
    reserved: u64,
    facts: DeviceFacts,
}

/// A process that is connected.
#[derive(Debug)]
struct Client {
    identity: Identity,
    lists: Vec<ProcessList>,
    /// Indices of the devices that it has open for CUDA.
    open: Vec<u32>,
    holdings: BTreeMap<u64, Holding>,
}

/// A context or an allocation.
#[derive(Debug)]
struct Holding {
    region: Region,
    /// `None` for a context.
    kind: Option<MemoryKind>,
    /// What was asked for.
    size: u64,
    /// What is on the device.
    resident: u64,
    /// What is on the device besides, for nobody's account.
    overhead: u64,
    /// The context whose end frees it too.
    context: Option<u64>,
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
            clients: BTreeMap::new(),
            faults: Vec::new(),
            leaving: Vec::new(),
            last_id: 0,
        }
    }

    /// A process connects.
    pub fn connect(&mut self, identity: Identity) -> ClientId {
        let id = self.new_id();
        let client = Client { identity, lists: Vec::new(), open: Vec::new(), holdings: BTreeMap::new() };
        self.clients.insert(id, client);
        id
    }

    /// A process is gone, however it went. Its memory comes back after the time that the driver
    /// takes to tear it down, unless the device is stuck.
    pub fn disconnect(&mut self, client: ClientId, now: Instant) {
        let Some(client) = self.clients.remove(&client) else { return };
        let mut held: BTreeMap<Region, (u64, u64)> = BTreeMap::new();
        for holding in client.holdings.values() {
            let (charged, uncharged) = held.entry(holding.region).or_default();
            *charged += client.charge(holding);
            *uncharged += holding.on_device() - client.charge(holding);
        }
        for (region, (charged, uncharged)) in held {
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
        let region = match request {
            Request::Check(region)
            | Request::Memory(region)
            | Request::Processes(region, _)
            | Request::CreateContext(region)
            | Request::Allocate { region, .. } => Some(*region),
            Request::Free(id) | Request::Touch { id, .. } => self
                .clients
                .get(&client)
                .and_then(|client| client.holdings.get(id))
                .map(|holding| holding.region),
            Request::Inventory | Request::Attach { .. } | Request::Control(_) => None,
        };
        let Some(region) = region else { return Duration::ZERO };
        self.faults_at(region).map(FaultKind::delay).sum()
    }

    /// Answers a request of a connected process. Whether it may change the simulator is the
    /// caller's to check.
    ///
    /// # Errors
    /// As the driver refuses it.
    pub fn answer(&mut self, client: ClientId, request: Request, now: Instant) -> Result<Reply, Failure> {
        self.leaving.retain(|leaving| leaving.until > now);
        match request {
            Request::Inventory => Ok(Reply::Inventory(self.inventory())),
            Request::Check(region) => self.reach(region).map(|()| Reply::Done),
            Request::Memory(region) => self.memory(region).map(Reply::Memory),
            Request::Processes(region, list) => self.processes(client, region, list).map(Reply::Processes),
            Request::Attach { devices, lists } => {
                let client = self.client(client)?;
                (client.open, client.lists) = (devices, lists);
                Ok(Reply::Done)
            }
            Request::CreateContext(region) => self.create_context(client, region).map(Reply::Made),
            Request::Allocate { region, kind, bytes, context } => {
                self.allocate(client, region, kind, bytes, context).map(Reply::Made)
            }
            Request::Touch { id, bytes } => self.touch(client, id, bytes).map(|()| Reply::Done),
            Request::Free(id) => self.free(client, id).map(|()| Reply::Done),
            Request::Control(control) => self.control(control),
        }
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

    /// Ends the faults and takes away the memory of one device, or of all.
    fn empty(&mut self, device: Option<u32>, force: bool) -> Result<(), Failure> {
        let touched = |region: Region| device.is_none_or(|device| device == region.device);
        let mut holdings = self.clients.values().flat_map(|client| client.holdings.values());
        if !force && holdings.any(|holding| touched(holding.region)) {
            return Err(Failure::InUse);
        }
        for client in self.clients.values_mut() {
            client.holdings.retain(|_, holding| !touched(holding.region));
        }
        self.faults.retain(|injected| !touched(injected.fault.region));
        self.leaving.retain(|leaving| !touched(leaving.region));
        Ok(())
    }

    fn create_context(&mut self, client: ClientId, region: Region) -> Result<u64, Failure> {
        let (size, overhead) = (self.config.context.0, self.config.context_overhead.0);
        self.make_room(region, size + overhead)?;
        self.hold(client, Holding { region, kind: None, size, resident: size, overhead, context: None })
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
        self.make_room(region, resident)?;
        self.hold(client, Holding { region, kind: Some(kind), size, resident, overhead: 0, context })
    }

    fn touch(&mut self, client: ClientId, id: u64, bytes: u64) -> Result<(), Failure> {
        let holding = self.client(client)?.holdings.get(&id).ok_or(Failure::Unknown)?;
        let (region, managed) = (holding.region, holding.kind == Some(MemoryKind::Managed));
        let wanted = bytes.next_multiple_of(GRANULARITY).min(holding.size).saturating_sub(holding.resident);
        self.reach(region)?;
        if !managed || wanted == 0 {
            return Ok(());
        }
        // What does not fit stays on the host.
        let brought = wanted.min(self.capacity(region).saturating_sub(self.used(region)));
        if let Some(holding) = self.client(client)?.holdings.get_mut(&id) {
            holding.resident += brought;
        }
        Ok(())
    }

    fn free(&mut self, client: ClientId, id: u64) -> Result<(), Failure> {
        let region = self.client(client)?.holdings.get(&id).ok_or(Failure::Unknown)?.region;
        self.reach(region)?;
        self.client(client)?.holdings.retain(|other, holding| *other != id && holding.context != Some(id));
        Ok(())
    }

    fn hold(&mut self, client: ClientId, holding: Holding) -> Result<u64, Failure> {
        let id = self.new_id();
        self.client(client)?.holdings.insert(id, holding);
        Ok(id)
    }

    /// Finds `bytes` in a region; managed memory gives way to them.
    fn make_room(&mut self, region: Region, bytes: u64) -> Result<(), Failure> {
        self.reach(region)?;
        let free = self.capacity(region).saturating_sub(self.used(region));
        let mut missing = bytes.saturating_sub(free);
        let movable =
            |holding: &Holding| holding.kind == Some(MemoryKind::Managed) && region.covers(holding.region);
        let holdings = || self.clients.values().flat_map(|client| client.holdings.values());
        if missing > holdings().filter(|holding| movable(holding)).map(|holding| holding.resident).sum() {
            return Err(Failure::OutOfMemory);
        }
        let holdings = self.clients.values_mut().flat_map(|client| client.holdings.values_mut());
        for holding in holdings.filter(|holding| movable(holding)) {
            let moved = missing.min(holding.resident);
            holding.resident -= moved;
            missing -= moved;
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

    fn processes(
        &self,
        client: ClientId,
        region: Region,
        list: ProcessList,
    ) -> Result<Vec<Process>, Failure> {
        self.reach(region)?;
        let viewer = self.clients.get(&client).ok_or(Failure::Unknown)?.identity.namespace();
        let mut shown: BTreeMap<(u32, Region), (&Identity, u64)> = BTreeMap::new();
        let mut show = |identity, at, bytes| {
            shown.entry((Identity::pid(identity), at)).or_insert((identity, 0)).1 += bytes;
        };
        for client in self.clients.values().filter(|client| client.lists.contains(&list)) {
            for holding in client.holdings.values().filter(|holding| region.covers(holding.region)) {
                if client.has_context(holding.region) {
                    show(&client.identity, holding.region, client.charge(holding));
                }
            }
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
        let mut holders: BTreeMap<(u32, Region), Holder> = BTreeMap::new();
        for client in self.clients.values() {
            for holding in client.holdings.values() {
                let (pid, region) = (client.identity.pid, holding.region);
                let none = Holder { pid, region, contexts: 0, charged: 0, uncharged: 0 };
                let holder = holders.entry((pid, region)).or_insert(none);
                holder.contexts += u32::from(holding.kind.is_none());
                holder.charged += client.charge(holding);
                holder.uncharged += holding.on_device() - client.charge(holding);
            }
        }
        let memory = (0..).zip(&self.devices).map(|(device, _)| {
            let region = Region { device, instance: None };
            let (capacity, reserved, used) =
                (self.capacity(region), self.reserved(region), self.used(region));
            Some(Memory { total: capacity + reserved, reserved, used, free: capacity.saturating_sub(used) })
        });
        State {
            inventory: self.inventory(),
            memory: memory.collect(),
            holders: holders.into_values().collect(),
            leaving: Bytes(self.leaving.iter().map(|leaving| leaving.bytes).sum()),
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
        let holdings = self.clients.values().flat_map(|client| client.holdings.values());
        let held = holdings.filter(|holding| region.covers(holding.region)).map(Holding::on_device);
        let leaving = self.leaving.iter().filter(|leaving| region.covers(leaving.region)).map(|l| l.bytes);
        let faults = self.faults.iter().map(|injected| &injected.fault);
        let faults = faults.filter(|fault| region.covers(fault.region)).map(|fault| fault.kind.held());
        let open = self.clients.values().any(|client| client.open.contains(&region.device));
        let open = (open && region.instance.is_none()).then_some(self.config.open_overhead.0);
        held.chain(leaving).chain(faults).chain(open).fold(0, u64::saturating_add)
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

    fn client(&mut self, id: ClientId) -> Result<&mut Client, Failure> {
        self.clients.get_mut(&id).ok_or(Failure::Unknown)
    }

    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

impl Client {
    fn has_context(&self, region: Region) -> bool {
        self.holdings.values().any(|holding| holding.kind.is_none() && holding.region == region)
    }

    /// What the process lists count of a holding. Memory that was made without a context begins to
    /// count when there is one.
    fn charge(&self, holding: &Holding) -> u64 {
        let charged = match holding.kind {
            None | Some(MemoryKind::Plain) => true,
            Some(MemoryKind::Managed) => false,
            Some(MemoryKind::Physical) => self.has_context(holding.region),
        };
        if charged { holding.resident } else { 0 }
    }
}

impl Holding {
    fn on_device(&self) -> u64 {
        self.resident + self.overhead
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
}
