//! Devices and what is fixed about them.

use std::ffi::{c_char, c_int, c_uint};

use gpusim::protocol::{Region, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, field, put, put_text, text};
use crate::session::{Handle, Session, facts, handle, with};

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// NVML_BRAND_NVIDIA: the data centre products.
const BRAND_NVIDIA: c_uint = 14;
/// NVML_DEVICE_ARCH_HOPPER.
const ARCHITECTURE_HOPPER: c_uint = 9;
/// Device and vendor of an H200 in PCI's numbering.
const PCI_DEVICE_ID: c_uint = 0x2335_10de;
const PCI_SUBSYSTEM_ID: c_uint = 0x18be_10de;

exports! {
    /// How many devices this process may see.
    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) {
        let devices = with(|session| Ok(session.devices().len()))?;
        put(count, c_uint::try_from(devices).map_err(|_| Code::Unknown)?)
    }

    /// A device by its position among those that this process may see.
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Handle>) {
        let index = usize::try_from(index).map_err(|_| Code::InvalidArgument)?;
        let find = |session: &mut Session| session.devices().get(index).map(|(region, _)| *region);
        open(device, find, Code::InvalidArgument)
    }

    /// A device or a MIG instance by its UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: Out<Handle>) {
        // SAFETY: a text that ends in a zero byte, as the interface asks.
        let uuid = unsafe { text(uuid) }?;
        open(device, |session| by_uuid(session, uuid), Code::NotFound)
    }

    /// A device by its PCI address.
    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, device: Out<Handle>) {
        // SAFETY: a text that ends in a zero byte, as the interface asks.
        let address = unsafe { text(address) }?;
        let named = |region: Region, session: &Session| {
            let bus = session.lookup(region).map_or(0, |(facts, _)| facts.bus);
            [bus_id(bus), legacy_bus_id(bus)].iter().any(|id| id.eq_ignore_ascii_case(address))
        };
        let find = |session: &mut Session| {
            session.devices().iter().map(|(region, _)| *region).find(|region| named(*region, session))
        };
        open(device, find, Code::NotFound)
    }

    /// Position of the device among those that this process may see.
    fn nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) {
        let position = with(|session| {
            let region = session.region(device)?;
            let whole = session.devices().iter().position(|(other, _)| *other == region);
            match region.instance {
                Some(instance) => Ok(instance),
                None => whole.and_then(|at| c_uint::try_from(at).ok()).ok_or(Code::Unknown),
            }
        })?;
        put(index, position)
    }

    /// Product name.
    fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) {
        let text = facts(device, |_, device, instance| {
            Ok(instance.map_or(&device.name, |instance| &instance.name).clone())
        })?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(name, length, &text) }
    }

    /// The identifier that no other device has.
    fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) {
        let text = facts(device, |_, device, instance| {
            Ok(instance.map_or(&device.uuid, |instance| &instance.uuid).clone())
        })?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(uuid, length, &text) }
    }

    /// Number N of the device node `/dev/nvidiaN`.
    fn nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) {
        let number = facts(device, |region, _, instance| match instance {
            None => Ok(region.device),
            Some(_) => Err(Code::NotSupported),
        })?;
        put(minor, number)
    }

    /// Place on the PCI bus.
    fn nvmlDeviceGetPciInfo_v3(device: Handle, info: Out<PciInfo>) {
        let bus = facts(device, |_, device, _| Ok(device.bus))?;
        put(info, PciInfo {
            bus_id_legacy: field(&legacy_bus_id(bus)),
            domain: 0,
            bus,
            device: 0,
            pci_device_id: PCI_DEVICE_ID,
            pci_subsystem_id: PCI_SUBSYSTEM_ID,
            bus_id: field(&bus_id(bus)),
        })
    }

    /// Line of products.
    fn nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) {
        facts(device, |_, _, _| Ok(()))?;
        put(brand, BRAND_NVIDIA)
    }

    /// Chip family.
    fn nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) {
        facts(device, |_, _, _| Ok(()))?;
        put(architecture, ARCHITECTURE_HOPPER)
    }

    /// What CUDA programs may use.
    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) {
        facts(device, |_, _, _| Ok(()))?;
        put(major, 9)?;
        put(minor, 0)
    }

    /// How busy the device is: nothing ever runs here.
    fn nvmlDeviceGetUtilizationRates(device: Handle, utilization: Out<Utilization>) {
        facts(device, |_, _, instance| if instance.is_some() { Err(Code::NotSupported) } else { Ok(()) })?;
        put(utilization, Utilization { gpu: 0, memory: 0 })
    }
}

/// Gives out the handle of what `find` finds, if it answers.
fn open(
    device: Out<Handle>,
    find: impl FnOnce(&mut Session) -> Option<Region>,
    otherwise: Code,
) -> Result<(), Code> {
    let region = with(|session| {
        let region = find(session).ok_or(otherwise)?;
        session.call(&Request::Check(region))?;
        Ok(region)
    })?;
    put(device, handle(region))
}

fn by_uuid(session: &Session, uuid: &str) -> Option<Region> {
    let devices = session.devices().iter();
    let mut regions =
        devices.flat_map(|(device, instances)| std::iter::once(device).chain(instances)).copied();
    regions.find(|region| match session.lookup(*region) {
        Some((device, None)) => device.uuid == uuid,
        Some((_, Some(instance))) => instance.uuid == uuid,
        None => false,
    })
}

fn bus_id(bus: c_uint) -> String {
    format!("00000000:{bus:02X}:00.0")
}

fn legacy_bus_id(bus: c_uint) -> String {
    format!("0000:{bus:02X}:00.0")
}
