//! Which devices there are.

use nvml_wrapper::{Device as NvmlDevice, error::NvmlError};

use crate::{CallError, Driver, ErrorClass};

/// The devices of the node, in the driver's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The devices. A GPU in MIG mode is not listed; its instances are.
    pub devices: Vec<DeviceInfo>,
    /// GPUs that could not be asked: their index and why.
    pub failed: Vec<(u32, CallError)>,
}

/// A device whose memory is its own: a GPU, or a MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// UUID: `GPU-...` or `MIG-...`.
    pub uuid: String,
    /// The driver's index of the GPU.
    pub index: u32,
    /// Number of the GPU's device node, `/dev/nvidia<minor>`, where the driver says.
    pub minor: Option<u32>,
    /// Product name, for example `NVIDIA H200` or `NVIDIA H200 MIG 1g.18gb`.
    pub product: String,
    /// Whether it is a whole GPU.
    pub partition: Partition,
    /// Bytes of memory, where the driver says.
    pub total: Option<u64>,
}

/// How a GPU is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Partition {
    /// Not at all.
    Whole,
    /// The device is a MIG instance. Memory belongs to the GPU instance: compute instances that
    /// share one share its bytes.
    Mig {
        /// UUID of the GPU.
        parent: String,
        /// GPU instance within the GPU.
        gpu_instance: u32,
        /// Compute instance within the GPU instance.
        compute_instance: u32,
    },
}

impl DeviceInfo {
    /// A short name that is unique on the node: `0`, or for a MIG instance `0/7`, or `0/7/1`
    /// where it is not the first compute instance of its GPU instance.
    pub fn label(&self) -> String {
        match &self.partition {
            Partition::Whole => self.index.to_string(),
            Partition::Mig { gpu_instance, compute_instance: 0, .. } => {
                format!("{}/{gpu_instance}", self.index)
            }
            Partition::Mig { gpu_instance, compute_instance, .. } => {
                format!("{}/{gpu_instance}/{compute_instance}", self.index)
            }
        }
    }
}

impl Driver {
    /// Lists the devices.
    ///
    /// # Errors
    /// Fails when the driver does not say how many there are. A GPU that cannot be asked is
    /// listed in [`Inventory::failed`].
    pub fn inventory(&self) -> Result<Inventory, CallError> {
        let count = self.nvml().device_count().map_err(|e| CallError::new("device count", e))?;
        let mut inventory = Inventory::default();
        for index in 0..count {
            match self.gpu(index) {
                Ok(devices) => inventory.devices.extend(devices),
                Err(error) => inventory.failed.push((index, error)),
            }
        }
        Ok(inventory)
    }

    /// The GPU at `index`, or its instances.
    fn gpu(&self, index: u32) -> Result<Vec<DeviceInfo>, CallError> {
        let gpu = self.nvml().device_by_index(index).map_err(|e| CallError::new("device handle", e))?;
        let minor = gpu.minor_number().ok();
        let whole = describe(&gpu, index, minor, Partition::Whole)?;
        let mig_on = gpu.mig_mode().is_ok_and(|mode| mode.current == 1);
        if !mig_on {
            return Ok(vec![whole]);
        }
        let slots = gpu.mig_device_count().map_err(|e| CallError::new("MIG device count", e))?;
        let mut instances = Vec::new();
        for slot in 0..slots {
            let instance = match gpu.mig_device_by_index(slot) {
                Ok(instance) => instance,
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue, // nothing in this slot
                Err(error) => return Err(CallError::new("MIG device handle", error)),
            };
            let (gpu_instance, compute_instance) = self.instance_ids(&instance)?;
            let partition = Partition::Mig { parent: whole.uuid.clone(), gpu_instance, compute_instance };
            instances.push(describe(&instance, index, minor, partition)?);
        }
        Ok(instances)
    }
}

fn describe(
    device: &NvmlDevice<'_>,
    index: u32,
    minor: Option<u32>,
    partition: Partition,
) -> Result<DeviceInfo, CallError> {
    let total = match device.memory_info() {
        Ok(memory) => Some(memory.total).filter(|&total| total != u64::MAX),
        Err(error) => match ErrorClass::from(error) {
            class @ ErrorClass::Lost => return Err(CallError::new("memory info", class)),
            _ => None,
        },
    };
    Ok(DeviceInfo {
        uuid: device.uuid().map_err(|e| CallError::new("UUID", e))?,
        index,
        minor,
        product: device.name().map_err(|e| CallError::new("product name", e))?,
        partition,
        total,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_unique_on_a_node() {
        let label = |partition| {
            DeviceInfo {
                uuid: "u".into(),
                index: 3,
                minor: None,
                product: "p".into(),
                partition,
                total: None,
            }
            .label()
        };
        let mig = |gpu_instance, compute_instance| Partition::Mig {
            parent: "u".into(),
            gpu_instance,
            compute_instance,
        };
        assert_eq!(label(Partition::Whole), "3");
        assert_eq!(label(mig(7, 0)), "3/7");
        assert_eq!(label(mig(7, 1)), "3/7/1");
    }
}
