//! The node's devices and their health, through NVML.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use tokio::sync::watch;

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// A device that pods may be given, whole or in shares: a GPU, or a MIG instance of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    /// Number of its device node; a MIG instance has none of its own.
    pub(crate) minor: Option<u32>,
    /// Number of the device node of the GPU that it is, or is a part of.
    pub(crate) file: Option<u32>,
    /// Whether it answers.
    pub(crate) healthy: bool,
}

impl Gpu {
    pub(crate) fn uuid(&self) -> String {
        self.uuid.clone()
    }
}

/// Looks at the devices from now on; a change of devices or health is a change of the value. NVML
/// may hang on a sick device, so that it has a thread of its own.
pub(crate) fn watch(library: PathBuf) -> io::Result<watch::Receiver<Vec<Gpu>>> {
    let (sender, receiver) = watch::channel(Vec::new());
    thread::Builder::new().name("devices".into()).spawn(move || look(&library, &sender))?;
    Ok(receiver)
}

fn look(library: &Path, sender: &watch::Sender<Vec<Gpu>>) {
    let mut nvml = None;
    let mut known = BTreeMap::new();
    let mut failure = String::new();
    while !sender.is_closed() {
        if nvml.is_none() {
            match Nvml::builder().lib_path(library.as_os_str()).init() {
                Ok(open) => nvml = Some(open),
                Err(error) if error.to_string() == failure => {}
                Err(error) => {
                    tracing::warn!(library = %library.display(), %error, "no driver yet");
                    failure = error.to_string();
                }
            }
        }
        if let Some(nvml) = &nvml {
            refresh(nvml, &mut known);
            let now: Vec<Gpu> = known.values().cloned().collect();
            sender.send_if_modified(|before| {
                let changed = *before != now;
                if changed {
                    tracing::info!(devices = ?now, "devices changed");
                    *before = now;
                }
                changed
            });
        }
        thread::sleep(PERIOD);
    }
}

/// Learns new devices, and asks the known ones whether they answer.
fn refresh(nvml: &Nvml, known: &mut BTreeMap<String, Gpu>) {
    for index in 0..nvml.device_count().unwrap_or(0) {
        if let Err(error) = nvml.device_by_index(index).and_then(|device| learn(&device, known)) {
            tracing::debug!(index, %error, "a device does not say who it is");
        }
    }
    for gpu in known.values_mut() {
        let answer = nvml.device_by_uuid(gpu.uuid.as_str()).and_then(|device| device.memory_info());
        // One that does not tell its memory can be used all the same.
        gpu.healthy = matches!(answer, Ok(_) | Err(NvmlError::NotSupported));
    }
}

fn learn(device: &Device, known: &mut BTreeMap<String, Gpu>) -> Result<(), NvmlError> {
    let divided = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    if !divided {
        let (uuid, minor) = (device.uuid()?, Some(device.minor_number()?));
        known.entry(uuid.clone()).or_insert(Gpu { uuid, minor, file: minor, healthy: true });
        return Ok(());
    }
    let file = device.minor_number().ok();
    for index in 0..device.mig_device_count()? {
        match device.mig_device_by_index(index) {
            Ok(instance) => {
                let uuid = instance.uuid()?;
                known.entry(uuid.clone()).or_insert(Gpu { uuid, minor: None, file, healthy: true });
            }
            Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
