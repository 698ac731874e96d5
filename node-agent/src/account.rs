//! The account step: from what the driver said of a device to its ledger, and to what is shown
//! of it.

use std::sync::Arc;

use highwater_crds::{ByteSize, DeviceFault, DriverReserve, HeadroomBand, Partition};
use highwater_gpu::{DeviceInfo, ErrorClass, Reading};
use highwater_policy::{
    ledger::{Account, Ledger, Memory, Sample},
    node_status,
    time::Millis,
};

/// Unexplained bytes, beyond what is normal, from which on somebody should look.
const UNUSUAL: u64 = ByteSize::GI;
/// How long something must last before it is told, in milliseconds.
const LASTING: u64 = 10_000;

/// A device of the node.
#[derive(Debug)]
pub(crate) struct Device {
    /// What the driver says that it is.
    pub(crate) info: DeviceInfo,
    /// UUID.
    pub(crate) uuid: Arc<str>,
    /// Short name on the node, such as `0` or `0/7`.
    pub(crate) label: String,
    /// The ledger at the last sample.
    pub(crate) ledger: Ledger,
    /// Why the device is not, or not wholly, measured.
    pub(crate) fault: Option<DeviceFault>,
    /// How full it is.
    pub(crate) headroom: HeadroomBand,
    /// Memory of dead processes stays allocated.
    pub(crate) zombie: Lasting,
    /// Much memory is in use that no process explains.
    pub(crate) unexplained: Lasting,
    /// Errors of the driver by class, in the order of [`ErrorClass::ALL`].
    pub(crate) errors: [u64; ErrorClass::ALL.len()],
    /// Samples that stayed torn.
    pub(crate) torn: u64,
    /// Unexplained bytes beyond what is normal at the last sample and the one before.
    unusual: [u64; 2],
    account: Account,
}

impl Device {
    /// A device that was not sampled yet.
    pub(crate) fn new(info: DeviceInfo) -> Self {
        Self {
            uuid: info.uuid.as_str().into(),
            label: info.label(),
            ledger: Ledger::default(),
            fault: None,
            headroom: HeadroomBand::Unknown,
            zombie: Lasting::default(),
            unexplained: Lasting::default(),
            errors: [0; ErrorClass::ALL.len()],
            torn: 0,
            unusual: [0; 2],
            account: Account::default(),
            info,
        }
    }

    /// Takes in what the driver says of it now. What it does not say any more still holds: a device
    /// that is lost has not changed.
    pub(crate) fn describe(&mut self, mut info: DeviceInfo) {
        info.total = info.total.or(self.info.total);
        info.minor = info.minor.or(self.info.minor);
        self.label = info.label();
        self.info = info;
    }

    /// How it is cut, in the words of the API.
    pub(crate) fn partition(&self) -> Partition {
        match self.info.partition {
            highwater_gpu::Partition::Whole => Partition::Whole,
            highwater_gpu::Partition::Mig { .. } => Partition::Mig,
        }
    }

    /// Whether anything is known of it.
    pub(crate) fn is_sampled(&self) -> bool {
        self.ledger != Ledger::default() || self.fault.is_some()
    }

    /// Accounts for a sample.
    pub(crate) fn take(
        &mut self,
        reading: &Reading,
        sample: Sample<'_>,
        reserve: Option<&DriverReserve>,
        declared: impl Fn(&str) -> u64,
        now: Millis,
    ) {
        for error in &reading.errors {
            let place = ErrorClass::ALL.iter().position(|class| *class == error.class);
            if let Some(count) = place.and_then(|at| self.errors.get_mut(at)) {
                *count += 1;
            }
        }
        self.torn += u64::from(reading.torn);
        let [_, last] = self.unusual;
        self.ledger = self.account.step(sample, reserve, declared, now);
        self.unusual = [last, if reading.torn { 0 } else { self.ledger.unusual() }];
        self.fault = fault(reading);
        self.headroom = node_status::band(self.headroom, self.ledger.level);
        self.zombie.step(self.ledger.zombie.map(|bytes| bytes > 0), now);
        self.unexplained.step(self.ledger.unexplained.map(|_| self.ledger.unusual() > UNUSUAL), now);
    }

    /// Bytes that no process list shows, beyond what is normal and in two samples on end: one alone may
    /// fall between two calls of the driver.
    pub(crate) fn unlisted(&self) -> u64 {
        self.unusual.into_iter().min().unwrap_or(0)
    }

    /// The driver does not answer about this device: nothing is known of it.
    pub(crate) fn unresponsive(&mut self) {
        self.ledger = Ledger::default();
        self.unusual = [0; 2];
        self.headroom = HeadroomBand::Unknown;
        self.fault = Some(DeviceFault::Unresponsive);
    }
}

/// What the driver said of the device's memory.
pub(crate) fn memory(reading: &Reading) -> Memory {
    Memory { total: reading.total, used: reading.used, reserved: reading.reserved }
}

fn fault(reading: &Reading) -> Option<DeviceFault> {
    if reading.lost() {
        return Some(DeviceFault::Lost);
    }
    if reading.total.is_none() || reading.used.is_none() {
        let unsupported = reading.errors.iter().all(|error| error.class == ErrorClass::NotSupported);
        return Some(if unsupported { DeviceFault::NoMemoryInfo } else { DeviceFault::DriverError });
    }
    match &reading.processes {
        Some(processes) if processes.iter().all(|process| process.bytes.is_some()) => None,
        _ => Some(DeviceFault::NoProcessInfo),
    }
}

/// Something that is said only when it has lasted, and taken back only when it has been over for
/// as long.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lasting {
    /// Whether it is said.
    pub(crate) holds: bool,
    otherwise_since: Option<Millis>,
}

impl Lasting {
    /// Takes in whether it holds now. `None`: not known.
    pub(crate) fn step(&mut self, now_holds: Option<bool>, now: Millis) {
        match now_holds {
            Some(holds) if holds != self.holds => {
                let since = *self.otherwise_since.get_or_insert(now);
                if now.since(since) >= LASTING {
                    *self = Self { holds, otherwise_since: None };
                }
            }
            Some(_) => self.otherwise_since = None,
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use highwater_gpu::{CallError, Kinds, Process};

    use super::*;

    fn device() -> Device {
        Device::new(DeviceInfo {
            uuid: "GPU-1".into(),
            index: 0,
            minor: None,
            product: "NVIDIA H200".into(),
            partition: highwater_gpu::Partition::Whole,
            total: Some(80 << 30),
        })
    }

    fn reading() -> Reading {
        Reading {
            total: Some(80 << 30),
            used: Some(1 << 30),
            free: Some(79 << 30),
            reserved: Some(0),
            processes: Some(vec![Process { pid: 1, bytes: Some(1 << 30), kinds: Kinds::default() }]),
            ..Reading::default()
        }
    }

    fn sample(reading: &Reading) -> Sample<'_> {
        Sample { memory: memory(reading), charges: None, torn: false, managed: false, ballast: 0 }
    }

    fn fault_of(reading: &Reading) -> Option<DeviceFault> {
        let mut device = device();
        device.take(reading, sample(reading), None, |_| 0, Millis(0));
        device.fault
    }

    #[test]
    fn each_way_of_not_being_measured_has_its_name() {
        let error = |class| vec![CallError { call: "memory info", class }];
        assert_eq!(fault_of(&reading()), None);
        let lost = Reading { errors: error(ErrorClass::Lost), ..Reading::default() };
        assert_eq!(fault_of(&lost), Some(DeviceFault::Lost));
        let silent = Reading { used: None, ..reading() };
        assert_eq!(fault_of(&silent), Some(DeviceFault::NoMemoryInfo));
        let broken = Reading { errors: error(ErrorClass::Other), ..Reading::default() };
        assert_eq!(fault_of(&broken), Some(DeviceFault::DriverError));
        let unlisted = Reading { processes: None, ..reading() };
        assert_eq!(fault_of(&unlisted), Some(DeviceFault::NoProcessInfo));
    }

    #[test]
    fn errors_are_counted_by_class() {
        let mut device = device();
        let errors = vec![CallError { call: "memory info", class: ErrorClass::Lost }];
        let reading = Reading { errors, ..Reading::default() };
        device.take(&reading, sample(&reading), None, |_| 0, Millis(0));
        assert_eq!(device.errors[0], 1);
        assert_eq!(ErrorClass::ALL[0], ErrorClass::Lost);
    }

    #[test]
    fn what_does_not_last_is_not_said() {
        let mut lasting = Lasting::default();
        for (time, holds, said) in [
            (0, Some(true), false),
            (5_000, Some(false), false),
            (6_000, Some(true), false),
            (15_999, Some(true), false),
            (16_000, Some(true), true),
            (17_000, None, true),
            (18_000, Some(false), true),
            (28_000, Some(false), false),
        ] {
            lasting.step(holds, Millis(time));
            assert_eq!(lasting.holds, said, "{time}");
        }
    }
}
