//! What the simulated host has: its driver and its devices.

use serde::{Deserialize, Serialize};

use crate::size::Bytes;

/// One simulated host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// Identifiers are derived from this, so that they are the same after a restart and differ
    /// between hosts with different seeds.
    pub seed: String,
    /// As NVML reports it.
    pub driver_version: String,
    /// The CUDA version that the driver supports: 1000 * major + 10 * minor.
    pub cuda_version: i32,
    /// Device memory that a CUDA context costs, and that its process is charged for.
    pub context: Bytes,
    /// Device memory that a context costs besides, and that nobody is charged for.
    pub context_overhead: Bytes,
    /// Device memory in use as long as any process has the device open, charged to nobody.
    pub open_overhead: Bytes,
    /// How long the driver takes to give back the memory of a process that died, in microseconds
    /// for each GiB that it held.
    pub teardown_microseconds_per_gibibyte: u64,
    /// How long a checkpoint takes, in milliseconds for each GiB.
    pub checkpoint_milliseconds_per_gibibyte: u64,
    /// How long a restore takes, in milliseconds for each GiB.
    pub restore_milliseconds_per_gibibyte: u64,
    /// Whether NVML limits the memory of cgroups.
    pub memory_limits: MemoryLimits,
    /// The devices, in index order.
    pub devices: Vec<DeviceConfig>,
}

/// Whether NVML limits the memory of cgroups. Drivers before [`FIRST_WITH_LIMITS`] never do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemoryLimits {
    /// On a machine with cgroup v2, as the driver does.
    #[default]
    Auto,
    /// On a machine with cgroup v1 too, by the paths of its memory controller. No driver does
    /// that: it lets tests of limits run there.
    Force,
    /// Nowhere.
    Off,
}

/// The first major version of the driver that limits the memory of cgroups.
pub const FIRST_WITH_LIMITS: u32 = 615;

/// One device, or several that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DeviceConfig {
    /// How many of them.
    pub count: u32,
    /// Product name.
    pub name: String,
    /// The whole memory, as NVML reports it.
    pub memory: Bytes,
    /// The part of it that the driver keeps.
    pub reserved: Bytes,
    /// MIG instances. The device has MIG mode on where there are any.
    pub mig: Vec<InstanceConfig>,
}

/// One MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InstanceConfig {
    /// Profile, for example `1g.18gb`.
    pub profile: String,
    /// Its memory.
    pub memory: Bytes,
    /// GPU instance number, unique within the device.
    pub gpu_instance: u32,
    /// Compute instance number within the GPU instance.
    #[serde(default)]
    pub compute_instance: u32,
}

impl Default for Config {
    /// One H200 with the driver that was measured.
    fn default() -> Self {
        Self {
            seed: "gpusim".into(),
            driver_version: "580.159.04".into(),
            cuda_version: 13_000,
            context: Bytes(518 << 20),
            context_overhead: Bytes(5_696 << 10),
            open_overhead: Bytes(3_328 << 10),
            // 60 GiB came back 146 ms after SIGKILL.
            teardown_microseconds_per_gibibyte: 2_433,
            // 20 GiB took 13.2 s and 4.4 s on an H200, which tests need not wait for.
            checkpoint_milliseconds_per_gibibyte: 0,
            restore_milliseconds_per_gibibyte: 0,
            memory_limits: MemoryLimits::Auto,
            devices: vec![DeviceConfig::default()],
        }
    }
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            count: 1,
            name: "NVIDIA H200".into(),
            memory: Bytes(143_771 << 20),
            reserved: Bytes(644_939_776),
            mig: Vec::new(),
        }
    }
}

impl Config {
    /// Reads a configuration from JSON.
    ///
    /// # Errors
    /// Says what to change where the text is not a configuration or describes no possible host.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let config: Self = serde_json::from_str(text).map_err(|error| format!("configuration: {error}"))?;
        config.validate()?;
        Ok(config)
    }

    /// Refuses what no host can be.
    fn validate(&self) -> Result<(), String> {
        for (index, device) in self.devices.iter().enumerate() {
            let wrong = |what: String| Err(format!("devices[{index}]: {what}"));
            if device.count == 0 {
                return wrong("count is 0: leave the entry out instead".into());
            }
            if device.name.is_empty() || device.name.len() > 63 {
                return wrong("name must have 1 to 63 bytes".into());
            }
            let Some(free) = device.memory.0.checked_sub(device.reserved.0) else {
                return wrong(format!("reserved {} is more than memory {}", device.reserved, device.memory));
            };
            let instances: u64 = device.mig.iter().map(|instance| instance.memory.0).sum();
            if instances > free {
                return wrong(format!("the MIG instances need {instances} of {free} bytes"));
            }
            for (position, instance) in device.mig.iter().enumerate() {
                let twin = |other: &&InstanceConfig| {
                    (other.gpu_instance, other.compute_instance)
                        == (instance.gpu_instance, instance.compute_instance)
                };
                if device.mig.iter().take(position).any(|other| twin(&other)) {
                    return wrong(format!(
                        "two MIG instances are numbered {}/{}",
                        instance.gpu_instance, instance.compute_instance
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether the driver has functions for the memory of cgroups.
    pub(crate) fn knows_limits(&self) -> bool {
        let major = self.driver_version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        major.is_some_and(|major| major >= FIRST_WITH_LIMITS) && self.memory_limits != MemoryLimits::Off
    }

    /// Every device of the host, in index order.
    pub(crate) fn each_device(&self) -> impl Iterator<Item = &DeviceConfig> {
        self.devices.iter().flat_map(|device| {
            std::iter::repeat_n(device, usize::try_from(device.count).unwrap_or(usize::MAX))
        })
    }
}

/// A UUID in NVIDIA's form that depends on nothing but the seed and the names.
pub(crate) fn uuid(prefix: &str, seed: &str, names: &[u32]) -> String {
    // FNV-1a over everything that names the device, then two rounds of a 64-bit mixer.
    let bytes = seed.bytes().chain(names.iter().flat_map(|name| name.to_le_bytes())).chain(prefix.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let (high, low) = (mix(hash), mix(mix(hash)));
    format!(
        "{prefix}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_object_is_one_h200() {
        assert_eq!(Config::from_json("{}").unwrap(), Config::default());
    }

    #[test]
    fn a_configuration_survives_json() {
        let config = Config {
            devices: vec![DeviceConfig {
                count: 8,
                mig: vec![InstanceConfig {
                    profile: "1g.18gb".into(),
                    memory: Bytes(16 << 30),
                    gpu_instance: 7,
                    compute_instance: 0,
                }],
                ..DeviceConfig::default()
            }],
            ..Config::default()
        };
        assert_eq!(Config::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn impossible_hosts_are_refused_with_the_reason() {
        for (json, reason) in [
            (r#"{"devices": [{"count": 0}]}"#, "devices[0]: count is 0"),
            (
                r#"{"devices": [{"memory": "1Gi", "reserved": "2Gi"}]}"#,
                "reserved 2Gi is more than memory 1Gi",
            ),
            (
                r#"{"devices": [{"mig": [{"profile": "x", "memory": "1Ti", "gpuInstance": 1}]}]}"#,
                "instances need",
            ),
            (r#"{"gpus": 8}"#, "unknown field `gpus`"),
        ] {
            let error = Config::from_json(json).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn only_newer_drivers_know_limits() {
        let knows = |json| Config::from_json(json).unwrap().knows_limits();
        assert!(!knows("{}"));
        assert!(!knows(r#"{"driverVersion": "580.159.04", "memoryLimits": "force"}"#));
        assert!(knows(r#"{"driverVersion": "615.10"}"#));
        assert!(!knows(r#"{"driverVersion": "615.10", "memoryLimits": "off"}"#));
        assert!(!knows(r#"{"driverVersion": "newest"}"#));
    }

    #[test]
    fn uuids_depend_on_seed_and_index_alone() {
        let first = uuid("GPU", "n1", &[0]);
        assert_eq!(first.len(), 40);
        assert_eq!(first, uuid("GPU", "n1", &[0]));
        assert_ne!(first, uuid("GPU", "n1", &[1]));
        assert_ne!(first, uuid("GPU", "n2", &[0]));
    }
}
