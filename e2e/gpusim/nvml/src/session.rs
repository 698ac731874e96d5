//! The connection to the daemon and the handles of this process.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use gpusim::client::{CallError, Client, socket_path};
use gpusim::protocol::{DeviceFacts, InstanceFacts, Inventory, Region, Reply, Request};
use gpusim::visible::Visible;

use crate::code::Code;
use crate::exports;

/// `nvmlDevice_t`: opaque to callers; ours is a number and points nowhere.
pub(crate) type Handle = *mut c_void;

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

/// What lasts from the first `nvmlInit` to the last `nvmlShutdown`.
pub(crate) struct Session {
    /// Calls of `nvmlInit` without their `nvmlShutdown`.
    users: usize,
    client: Client,
    /// The process that made the connection: a child after `fork` must make its own.
    owner: u32,
    inventory: Inventory,
    /// What of it this process may see.
    devices: Vec<(Region, Vec<Region>)>,
}

exports! {
    /// Opens the driver.
    fn nvmlInit_v2() { open() }

    /// Opens the driver.
    fn nvmlInit() { open() }

    /// Opens the driver; the flags ask to bear with hosts without devices, which is no hardship.
    fn nvmlInitWithFlags(_flags: std::ffi::c_uint) { open() }

    /// Closes the driver, when this ends the last use of it.
    fn nvmlShutdown() {
        let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let open = session.as_mut().ok_or(Code::Uninitialized)?;
        open.users -= 1;
        if open.users == 0 {
            *session = None;
        }
        Ok(())
    }
}

fn open() -> Result<(), Code> {
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    match session.as_mut() {
        Some(session) => session.users += 1,
        None => *session = Some(Session::open()?),
    }
    Ok(())
}

/// Runs `body` with the open session.
pub(crate) fn with<T>(body: impl FnOnce(&mut Session) -> Result<T, Code>) -> Result<T, Code> {
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    body(session.as_mut().ok_or(Code::Uninitialized)?)
}

/// Asks the driver about a handle.
pub(crate) fn ask(handle: Handle, request: impl FnOnce(Region) -> Request) -> Result<Reply, Code> {
    with(|session| {
        let region = session.region(handle)?;
        session.call(&request(region))
    })
}

/// Facts about the handle's device, which the driver gives only while the device answers.
pub(crate) fn facts<T>(
    handle: Handle,
    body: impl FnOnce(Region, &DeviceFacts, Option<&InstanceFacts>) -> Result<T, Code>,
) -> Result<T, Code> {
    with(|session| {
        let region = session.region(handle)?;
        session.call(&Request::Check(region))?;
        let (device, instance) = session.lookup(region).ok_or(Code::InvalidArgument)?;
        body(region, device, instance)
    })
}

impl Session {
    fn open() -> Result<Self, Code> {
        let client = Client::observe(&socket_path()).map_err(|_| Code::DriverNotLoaded)?;
        let inventory = Inventory { driver_version: String::new(), cuda_version: 0, devices: Vec::new() };
        let mut session =
            Self { users: 1, client, owner: std::process::id(), inventory, devices: Vec::new() };
        session.refresh()?;
        Ok(session)
    }

    /// Learns the devices anew.
    pub(crate) fn refresh(&mut self) -> Result<(), Code> {
        match self.call(&Request::Inventory)? {
            Reply::Inventory(inventory) => {
                self.devices = Visible::from_environment().devices(&inventory);
                self.inventory = inventory;
                Ok(())
            }
            _ => Err(Code::Unknown),
        }
    }

    /// Asks the daemon; connects again where it was started anew.
    pub(crate) fn call(&mut self, request: &Request) -> Result<Reply, Code> {
        if self.owner == std::process::id() {
            match self.client.call(request) {
                Err(CallError::Disconnected(_)) => {}
                result => return Ok(result?),
            }
        }
        self.client = Client::observe(&socket_path()).map_err(|_| Code::DriverNotLoaded)?;
        self.owner = std::process::id();
        Ok(self.client.call(request)?)
    }

    /// The driver and all its devices.
    pub(crate) fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// The devices that this process may see, each with its instances.
    pub(crate) fn devices(&self) -> &[(Region, Vec<Region>)] {
        &self.devices
    }

    /// What a handle stands for.
    pub(crate) fn region(&self, handle: Handle) -> Result<Region, Code> {
        let devices = self.devices();
        let mut regions =
            devices.iter().flat_map(|(device, instances)| std::iter::once(device).chain(instances));
        regions.find(|region| self::handle(**region) == handle).copied().ok_or(Code::InvalidArgument)
    }

    /// The facts about a region.
    pub(crate) fn lookup(&self, region: Region) -> Option<(&DeviceFacts, Option<&InstanceFacts>)> {
        let device = self.inventory.devices.get(usize::try_from(region.device).ok()?)?;
        match region.instance {
            None => Some((device, None)),
            Some(instance) => Some((device, Some(device.instances.get(usize::try_from(instance).ok()?)?))),
        }
    }
}

/// The handle of a region: never null, and never another region's.
pub(crate) fn handle(region: Region) -> Handle {
    let instance = region.instance.map_or(0, |instance| u64::from(instance) + 1);
    let number = ((u64::from(region.device) + 1) << 16 | instance) << 4;
    std::ptr::without_provenance_mut(usize::try_from(number).unwrap_or(usize::MAX))
}
