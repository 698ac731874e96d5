//! Devices.

use std::ffi::{CStr, c_char, c_int, c_uint};

use gpusim::protocol::{DeviceFacts, InstanceFacts, Region, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_text};
use crate::session::{Session, ordinal, with};

/// The highest `CUdevice_attribute` that is known here.
const LAST_ATTRIBUTE: c_int = 150;

exports! {
    /// How many devices this process may use.
    fn cuDeviceGetCount(count: Out<c_int>) {
        let devices = with(|session| Ok(session.devices.len()))?;
        put(count, c_int::try_from(devices).map_err(|_| Code::Unknown)?)
    }

    /// The device with that ordinal.
    fn cuDeviceGet(device: Out<c_int>, index: c_int) {
        let out = device.ok_or(Code::InvalidValue)?;
        with(|session| ordinal(session, index))?;
        put(Some(out), index)
    }

    /// Product name.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        let text = facts(device, |_, device, instance| instance.map_or(&device.name, |i| &i.name).clone())?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(name, length, &text) }
    }

    /// The identifier of the device, MIG or not.
    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) {
        put(uuid, binary(&facts(device, |_, device, _| device.uuid.clone())?))
    }

    /// The identifier of the device, or of the MIG instance that stands for it.
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
        let text = facts(device, |_, device, instance| instance.map_or(&device.uuid, |i| &i.uuid).clone())?;
        put(uuid, binary(&text))
    }

    /// Bytes that allocations may have, as far as 32 bits tell.
    fn cuDeviceTotalMem(bytes: Out<c_uint>, device: c_int) {
        let usable = facts(device, |_, device, instance| instance.map_or(device.usable, |i| i.usable))?;
        put(bytes, c_uint::try_from(usable).unwrap_or(c_uint::MAX))
    }

    /// Bytes that allocations may have.
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        let usable = facts(device, |_, device, instance| instance.map_or(device.usable, |i| i.usable))?;
        put(bytes, usize::try_from(usable).map_err(|_| Code::Unknown)?)
    }

    /// What CUDA programs may use.
    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) {
        facts(device, |_, _, _| ())?;
        put(major, 9)?;
        put(minor, 0)
    }

    /// Place on the PCI bus.
    fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: c_int) {
        let bus = facts(device, |_, device, _| device.bus)?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(id, length, &format!("0000:{bus:02X}:00.0")) }
    }

    /// The device at a place on the PCI bus.
    fn cuDeviceGetByPCIBusId(device: Out<c_int>, address: *const c_char) {
        let out = device.ok_or(Code::InvalidValue)?;
        if address.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: a text that ends in a zero byte, as the interface asks.
        let address = unsafe { CStr::from_ptr(address) }.to_str().map_err(|_| Code::InvalidValue)?;
        // Domain, bus and device, the first and the function perhaps left out.
        let parts: Vec<&str> = address.split(':').collect();
        let (bus, place) = match parts.as_slice() {
            [_, bus, place] | [bus, place] => (*bus, *place),
            _ => return Err(Code::InvalidValue),
        };
        let bus = u32::from_str_radix(bus, 16).map_err(|_| Code::InvalidValue)?;
        let place = place.split('.').next().unwrap_or_default();
        let first = u32::from_str_radix(place, 16).map_err(|_| Code::InvalidValue)? == 0;
        let found = with(|session| {
            let at = session.devices.iter().position(|region| {
                first && lookup(session, *region).is_some_and(|(device, _)| device.bus == bus)
            });
            at.and_then(|at| c_int::try_from(at).ok()).ok_or(Code::InvalidDevice)
        })?;
        put(Some(out), found)
    }

    /// Whether a device may use another's memory: each may.
    fn cuDeviceCanAccessPeer(answer: Out<c_int>, device: c_int, peer: c_int) {
        with(|session| ordinal(session, device).and(ordinal(session, peer)).map(|_| ()))?;
        put(answer, c_int::from(device != peer))
    }

    /// One of many numbers about a device; those that no workload of ours reads are 0.
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) {
        let out = value.ok_or(Code::InvalidValue)?;
        let bus = facts(device, |_, device, _| device.bus)?;
        let known = match attribute {
            // Threads in a block; in its x, y and z.
            1..=3 => 1024,
            4 => 64,
            // Blocks in a grid's x, y and z.
            5 => c_int::MAX,
            6 | 7 => 65_535,
            // Threads in a warp; multiprocessors; threads in each.
            10 => 32,
            16 => 132,
            39 => 2048,
            // PCI bus.
            33 => c_int::try_from(bus).map_err(|_| Code::Unknown)?,
            // Compute capability 9.0.
            75 => 9,
            // Maps host memory; unified addresses; managed memory, also from both sides at once;
            // virtual memory management with descriptors to share; pools.
            19 | 41 | 83 | 89 | 102 | 103 | 115 => 1,
            other if other <= LAST_ATTRIBUTE && other > 0 => 0,
            _ => return Err(Code::InvalidValue),
        };
        put(Some(out), known)
    }
}

fn facts<T>(
    device: c_int,
    body: impl FnOnce(Region, &DeviceFacts, Option<&InstanceFacts>) -> T,
) -> Result<T, Code> {
    with(|session| {
        let ordinal = ordinal(session, device)?;
        let region = session.region(ordinal)?;
        session.call(&Request::Check(region))?;
        let (facts, instance) = lookup(session, region).ok_or(Code::InvalidDevice)?;
        Ok(body(region, facts, instance))
    })
}

fn lookup(session: &Session, region: Region) -> Option<(&DeviceFacts, Option<&InstanceFacts>)> {
    let device = session.inventory.devices.get(usize::try_from(region.device).ok()?)?;
    let instance = region.instance.and_then(|at| device.instances.get(usize::try_from(at).ok()?));
    Some((device, instance))
}

/// The 16 bytes that a UUID spells after its prefix.
fn binary(uuid: &str) -> [u8; 16] {
    let digits = uuid.split_once('-').map_or(uuid, |(_, digits)| digits);
    let mut digits = digits.chars().filter_map(|digit| digit.to_digit(16));
    std::array::from_fn(|_| {
        let (high, low) = (digits.next().unwrap_or(0), digits.next().unwrap_or(0));
        u8::try_from(high * 16 + low).unwrap_or(0)
    })
}
