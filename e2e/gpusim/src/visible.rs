//! Which devices a process may see, by the variable that container runtimes set.

use crate::protocol::{Inventory, Region};

/// The variable: absent, empty or `all` shows everything, `void` and `none` show nothing;
/// otherwise a list, separated by commas, of UUIDs or device indices.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The variable by which a process narrows and orders what CUDA shows it: absent shows everything;
/// otherwise a list, separated by commas, of indices, and of UUIDs of devices or MIG instances or
/// beginnings of these. What follows the first name of nothing does not count.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// What a process may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visible(Option<Vec<String>>);

impl Visible {
    /// Reads this process's environment.
    pub fn from_environment() -> Self {
        Self::parse(std::env::var(VISIBLE_DEVICES).ok().as_deref())
    }

    /// Reads the variable's value.
    pub fn parse(value: Option<&str>) -> Self {
        match value {
            None | Some("" | "all") => Self(None),
            Some("void" | "none") => Self(Some(Vec::new())),
            Some(list) => Self(Some(list.split(',').map(|name| name.trim().to_owned()).collect())),
        }
    }

    /// Whether the whole device is named.
    fn device(&self, index: u32, uuid: &str) -> bool {
        self.0
            .as_ref()
            .is_none_or(|names| names.iter().any(|name| name == uuid || *name == index.to_string()))
    }

    /// Whether the instance is named, by itself or with its device.
    fn instance(&self, index: u32, device: &str, uuid: &str) -> bool {
        self.device(index, device) || self.0.iter().flatten().any(|name| name == uuid)
    }

    /// Devices as NVML shows them: those with anything to see, each with its visible instances.
    pub fn devices(&self, inventory: &Inventory) -> Vec<(Region, Vec<Region>)> {
        let devices = (0..).zip(&inventory.devices).map(|(device, facts)| {
            let instances = (0..).zip(&facts.instances);
            let seen = instances.filter(|(_, instance)| self.instance(device, &facts.uuid, &instance.uuid));
            let seen: Vec<_> = seen.map(|(at, _)| Region { device, instance: Some(at) }).collect();
            (self.device(device, &facts.uuid) || !seen.is_empty())
                .then_some((Region { device, instance: None }, seen))
        });
        devices.flatten().collect()
    }

    /// Devices as CUDA shows them: whole ones, and where MIG is on the first visible instance,
    /// since a process can use only one instance of a device.
    pub fn compute_devices(&self, inventory: &Inventory) -> Vec<Region> {
        let devices = self.devices(inventory).into_iter();
        let usable = devices.filter_map(|(whole, instances)| {
            let facts = inventory.devices.get(usize::try_from(whole.device).ok()?)?;
            if facts.instances.is_empty() { Some(whole) } else { instances.first().copied() }
        });
        usable.collect()
    }
}

impl Visible {
    /// Devices as CUDA shows them to a process whose [`CUDA_VISIBLE_DEVICES`] is that.
    pub fn chosen_devices(&self, inventory: &Inventory, chosen: Option<&str>) -> Vec<Region> {
        let all = self.compute_devices(inventory);
        let Some(chosen) = chosen else { return all };
        let instances = self.devices(inventory).into_iter().flat_map(|(_, instances)| instances);
        let instances: Vec<Region> = instances.collect();
        let mut devices = Vec::new();
        for name in chosen.split(',').map(str::trim) {
            let by_index = name.parse::<usize>().ok().and_then(|index| all.get(index));
            let by_name = || {
                let named = |region: &&Region| uuids(inventory, **region).any(|uuid| uuid.starts_with(name));
                let mut found = all.iter().filter(named);
                let whole = found.next().filter(|_| found.next().is_none());
                whole.or_else(|| {
                    instances.iter().find(|region| uuids(inventory, **region).any(|uuid| uuid == name))
                })
            };
            let named = !name.is_empty() && name.contains('-') && !name.starts_with('-');
            match by_index.or_else(|| if named { by_name() } else { None }) {
                Some(region) if !devices.contains(region) => devices.push(*region),
                _ => break,
            }
        }
        devices
    }
}

/// The names of a region: its own, and its device's.
fn uuids(inventory: &Inventory, region: Region) -> impl Iterator<Item = &str> {
    let device = usize::try_from(region.device).ok().and_then(|index| inventory.devices.get(index));
    let instance =
        device.zip(region.instance).and_then(|(device, at)| device.instances.get(usize::try_from(at).ok()?));
    device
        .map(|device| device.uuid.as_str())
        .into_iter()
        .chain(instance.map(|instance| instance.uuid.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{DeviceFacts, InstanceFacts};

    fn inventory() -> Inventory {
        let instance = |uuid: &str| InstanceFacts {
            uuid: uuid.into(),
            name: "m".into(),
            usable: 0,
            gpu_instance: 1,
            compute_instance: 0,
        };
        let device = |uuid: &str, instances| DeviceFacts {
            uuid: uuid.into(),
            name: "d".into(),
            bus: 1,
            usable: 0,
            instances,
        };
        Inventory {
            driver_version: String::new(),
            cuda_version: 0,
            devices: vec![
                device("GPU-a", vec![]),
                device("GPU-b", vec![instance("MIG-x"), instance("MIG-y")]),
            ],
        }
    }

    fn compute(value: Option<&str>) -> Vec<(u32, Option<u32>)> {
        let seen = Visible::parse(value).compute_devices(&inventory());
        seen.iter().map(|region| (region.device, region.instance)).collect()
    }

    #[test]
    fn everything_is_visible_unless_told_otherwise() {
        for value in [None, Some(""), Some("all")] {
            assert_eq!(compute(value), [(0, None), (1, Some(0))], "{value:?}");
        }
    }

    #[test]
    fn nothing_is_visible_when_void() {
        assert!(compute(Some("void")).is_empty());
        assert!(compute(Some("none")).is_empty());
        assert!(compute(Some("GPU-unknown")).is_empty());
    }

    #[test]
    fn a_list_shows_what_it_names() {
        assert_eq!(compute(Some("GPU-a")), [(0, None)]);
        assert_eq!(compute(Some("MIG-y,0")), [(0, None), (1, Some(1))]);
        let seen = Visible::parse(Some("MIG-y")).devices(&inventory());
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].1, [Region { device: 1, instance: Some(1) }]);
    }

    fn chosen(container: Option<&str>, process: Option<&str>) -> Vec<(u32, Option<u32>)> {
        let seen = Visible::parse(container).chosen_devices(&inventory(), process);
        seen.iter().map(|region| (region.device, region.instance)).collect()
    }

    #[test]
    fn a_process_narrows_and_orders_what_it_sees() {
        assert_eq!(chosen(None, None), [(0, None), (1, Some(0))]);
        assert_eq!(chosen(None, Some("1,0")), [(1, Some(0)), (0, None)]);
        assert_eq!(chosen(None, Some("GPU-a")), [(0, None)]);
        assert_eq!(chosen(None, Some("MIG-y, GPU-a")), [(1, Some(1)), (0, None)]);
        assert_eq!(chosen(Some("GPU-b"), Some("0")), [(1, Some(0))]);
    }

    #[test]
    fn nothing_counts_from_a_name_of_nothing_on() {
        for nothing in ["", "-1", "7", "GPU-z", "void", "GPU-"] {
            assert!(chosen(None, Some(nothing)).is_empty(), "{nothing:?}");
        }
        assert_eq!(chosen(None, Some("0,7,1")), [(0, None)]);
        assert_eq!(chosen(None, Some("0,0")), [(0, None)]);
        assert!(chosen(Some("GPU-a"), Some("MIG-x")).is_empty());
    }
}
