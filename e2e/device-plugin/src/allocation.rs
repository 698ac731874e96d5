//! The units that the kubelet counts, and which of them to take. No IO.

use std::collections::BTreeMap;

use kubelet_api::deviceplugin::{Device, HEALTHY, UNHEALTHY};

use crate::devices::Gpu;

/// Between a device's UUID and the number of the unit.
const SEPARATOR: &str = "::";

/// The units of these devices: each device itself, or as many shares of it as pods may have.
pub(crate) fn units(gpus: &[Gpu], replicas: u32) -> Vec<Device> {
    let unit = |gpu: &Gpu, id| Device {
        id,
        health: if gpu.healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
        topology: None,
    };
    let of_one = |gpu| {
        let ids = (0..replicas).map(|number| match replicas {
            1 => Gpu::uuid(gpu),
            _ => format!("{}{SEPARATOR}{number}", gpu.uuid),
        });
        ids.map(|id| unit(gpu, id)).collect::<Vec<_>>()
    };
    gpus.iter().flat_map(of_one).collect()
}

/// The device that a unit is a share of.
pub(crate) fn device_of(unit: &str) -> &str {
    unit.split_once(SEPARATOR).map_or(unit, |(device, _)| device)
}

/// Chooses `size` of the free units, with those that must be among them.
///
/// A container that asks for several gets several devices as far as there are; among devices, the
/// one with the fewest free units comes first, so that pods fill one device before the next.
pub(crate) fn preferred(available: &[String], must_include: &[String], size: usize) -> Vec<String> {
    let mut chosen: Vec<String> = must_include.iter().take(size).cloned().collect();
    let mut free: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for unit in available.iter().filter(|unit| !must_include.contains(unit)) {
        free.entry(device_of(unit)).or_default().push(unit);
    }
    for units in free.values_mut() {
        // Taken from the end, so in ascending order.
        units.sort_unstable_by(|one, other| other.cmp(one));
    }
    while chosen.len() < size {
        let held = |device: &str| chosen.iter().filter(|unit| device_of(unit) == device).count();
        let candidates = free.iter().filter(|(_, units)| !units.is_empty());
        let best =
            candidates.min_by_key(|(device, units)| (held(device), units.len())).map(|(device, _)| *device);
        let Some(unit) = best.and_then(|device| free.get_mut(device)).and_then(Vec::pop) else { break };
        chosen.push(unit.clone());
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, healthy: bool) -> Gpu {
        Gpu { uuid: uuid.into(), minor: Some(0), file: Some(0), healthy }
    }

    fn ids(units: &[&str]) -> Vec<String> {
        units.iter().map(|unit| (*unit).to_owned()).collect()
    }

    #[test]
    fn a_shared_device_is_several_units_and_a_whole_one_is_itself() {
        let gpus = [gpu("GPU-a", true), gpu("GPU-b", false)];
        let shared = units(&gpus, 2);
        let names: Vec<_> = shared.iter().map(|unit| unit.id.as_str()).collect();
        assert_eq!(names, ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"]);
        assert_eq!(shared[0].health, HEALTHY);
        assert_eq!(shared[3].health, UNHEALTHY);
        assert_eq!(units(&gpus, 1)[0].id, "GPU-a");
        assert_eq!(device_of("GPU-a::1"), "GPU-a");
        assert_eq!(device_of("GPU-a"), "GPU-a");
    }

    #[test]
    fn an_identifier_fits_the_kubelet_s_limit() {
        let uuid = "GPU-12345678-1234-1234-1234-123456789012";
        assert!(units(&[gpu(uuid, true)], 1024).iter().all(|unit| unit.id.len() <= 63));
    }

    #[test]
    fn pods_fill_one_device_before_the_next() {
        let available = ids(&["GPU-a::0", "GPU-a::1", "GPU-b::1"]);
        assert_eq!(preferred(&available, &[], 1), ids(&["GPU-b::1"]));
        let untouched = ids(&["GPU-b::0", "GPU-b::1", "GPU-a::1", "GPU-a::0"]);
        assert_eq!(preferred(&untouched, &[], 1), ids(&["GPU-a::0"]));
    }

    #[test]
    fn a_container_that_asks_for_two_gets_two_devices() {
        let available = ids(&["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"]);
        assert_eq!(preferred(&available, &[], 2), ids(&["GPU-a::0", "GPU-b::0"]));
        assert_eq!(preferred(&available, &[], 4).len(), 4);
    }

    #[test]
    fn what_must_be_included_is() {
        let available = ids(&["GPU-a::0", "GPU-a::1", "GPU-b::0"]);
        let chosen = preferred(&available, &ids(&["GPU-a::1"]), 2);
        assert_eq!(chosen, ids(&["GPU-a::1", "GPU-b::0"]));
        assert_eq!(preferred(&available, &[], 9).len(), 3, "no more than there are");
    }
}
