//! Checkpoints: a process's memory leaves the device and comes back, while the process stays.

use std::time::Duration;

use super::ledger::Stage;
use super::{ClientId, Driver};
use crate::fault::FaultKind;
use crate::protocol::{CheckpointStep, Failure, ProcessState, Region, Request, Stopped};

/// The first major version of the driver that checkpoints processes.
pub const FIRST_WITH_CHECKPOINTS: u32 = 570;

/// A step that has begun.
#[derive(Debug)]
pub struct Begun {
    clients: Vec<ClientId>,
    step: CheckpointStep,
    /// How long it takes.
    pub lasts: Duration,
}

impl Driver {
    /// Where a process is, by its PID as the asker counts it.
    ///
    /// # Errors
    /// Where no such process uses CUDA, or the driver is too old.
    pub fn process_state(&self, asker: ClientId, pid: u32) -> Result<ProcessState, Failure> {
        let clients = self.process(asker, pid)?;
        let stage = clients.first().and_then(|id| self.ledger.client(*id)).map(|client| client.stage);
        stage.map(shown).ok_or(Failure::NoSuchProcess)
    }

    /// Processes that do not run.
    pub(super) fn stopped(&self) -> Vec<Stopped> {
        let clients = self.ledger.using_cuda(|_| true).into_iter();
        let clients = clients.filter_map(|id| Some((id, self.ledger.client(id)?)));
        let stopped = clients.filter(|(_, client)| client.stage != Stage::Running);
        let stopped = stopped.map(|(id, client)| Stopped {
            pid: client.identity.pid,
            state: shown(client.stage),
            bytes: self.ledger.bytes_of(id),
        });
        stopped.collect()
    }

    /// Begins a step of a process; it is to be ended after the time that it takes, whatever becomes of
    /// the asker meanwhile.
    ///
    /// # Errors
    /// Where the process is not where the step begins, or a fault has it fail.
    pub fn begin_step(&mut self, asker: ClientId, pid: u32, step: CheckpointStep) -> Result<Begun, Failure> {
        let clients = self.process(asker, pid)?;
        let (from, over) = match step {
            CheckpointStep::Lock => (Stage::Running, Stage::Running),
            CheckpointStep::Checkpoint => (Stage::Locked, Stage::Leaving),
            CheckpointStep::Restore => (Stage::Checkpointed, Stage::Coming),
            CheckpointStep::Unlock => (Stage::Locked, Stage::Locked),
        };
        let there = |id: &ClientId| self.ledger.client(*id).is_some_and(|client| client.stage == from);
        if !clients.iter().all(there) {
            return Err(Failure::OtherState);
        }
        if let Some(loses) = self.breaks(&clients, step) {
            if loses {
                for id in &clients {
                    self.ledger.lose(*id);
                }
            }
            return Err(if step == CheckpointStep::Lock {
                Failure::NotLocked
            } else {
                Failure::NotSupported
            });
        }
        let bytes: u64 = clients.iter().map(|id| self.ledger.bytes_of(*id)).sum();
        let rate = match step {
            CheckpointStep::Checkpoint => self.config.checkpoint_milliseconds_per_gibibyte,
            CheckpointStep::Restore => self.config.restore_milliseconds_per_gibibyte,
            CheckpointStep::Lock | CheckpointStep::Unlock => 0,
        };
        let milliseconds = (u128::from(bytes) * u128::from(rate)) >> 30;
        let lasts = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX));
        for id in &clients {
            if let Some(client) = self.ledger.client_mut(*id) {
                client.stage = over;
            }
        }
        Ok(Begun { clients, step, lasts })
    }

    /// Ends a step.
    ///
    /// # Errors
    /// Where there is no room for what is restored, which stays on the host; or where it cannot be
    /// restored, and the process is lost.
    pub fn end_step(&mut self, begun: &Begun) -> Result<(), Failure> {
        for (at, id) in begun.clients.iter().enumerate() {
            let stage = match begun.step {
                CheckpointStep::Lock => Stage::Locked,
                CheckpointStep::Unlock => Stage::Running,
                CheckpointStep::Checkpoint => {
                    self.ledger.checkpoint(*id);
                    Stage::Checkpointed
                }
                CheckpointStep::Restore => match self.restore(*id) {
                    Ok(()) => Stage::Locked,
                    Err(failure) => {
                        let lost = failure != Failure::OutOfMemory;
                        for (other, id) in begun.clients.iter().enumerate() {
                            if lost {
                                self.ledger.lose(*id);
                            } else if other < at {
                                self.ledger.checkpoint(*id);
                            }
                            self.set_stage(*id, if lost { Stage::Failed } else { Stage::Checkpointed });
                        }
                        return Err(failure);
                    }
                },
            };
            self.set_stage(*id, stage);
        }
        Ok(())
    }

    /// Whether a request has to wait, because its process is not running.
    pub fn is_stopped(&self, client: ClientId, request: &Request) -> bool {
        let stopped = self.ledger.client(client).is_some_and(|client| client.stage != Stage::Running);
        stopped
            && !matches!(
                request,
                Request::Epoch
                    | Request::Ends
                    | Request::Inventory
                    | Request::Check(_)
                    | Request::Memory(_)
                    | Request::Processes(..)
                    | Request::ProcessState(_)
                    | Request::Checkpoint { .. }
                    | Request::Control(_)
            )
    }

    fn set_stage(&mut self, id: ClientId, stage: Stage) {
        if let Some(client) = self.ledger.client_mut(id) {
            client.stage = stage;
        }
    }

    fn restore(&mut self, id: ClientId) -> Result<(), Failure> {
        let Some((needed, whole)) = self.ledger.image(id) else { return Ok(()) };
        if !whole {
            return Err(Failure::NotSupported);
        }
        for (region, bytes) in &needed {
            self.make_room(*region, *bytes)?;
        }
        self.ledger.restore(id);
        Ok(())
    }

    /// What of a process is connected for CUDA.
    fn process(&self, asker: ClientId, pid: u32) -> Result<Vec<ClientId>, Failure> {
        let major = self.config.driver_version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < FIRST_WITH_CHECKPOINTS) {
            return Err(Failure::NotSupported);
        }
        let viewer = self.ledger.client(asker).ok_or(Failure::Unknown)?.identity.namespace();
        let clients = self.ledger.using_cuda(|identity| identity.pid_in(viewer) == Some(pid));
        if clients.is_empty() { Err(Failure::NoSuchProcess) } else { Ok(clients) }
    }

    /// Whether a fault has a step fail, and if so, whether the process is lost by it.
    fn breaks(&self, clients: &[ClientId], step: CheckpointStep) -> Option<bool> {
        let regions = clients.iter().flat_map(|id| self.ledger.devices_of(*id));
        let mut regions = regions.map(|device| Region { device, instance: None });
        regions.find_map(|region| {
            self.faults_at(region).find_map(|kind| match kind {
                FaultKind::Checkpoint { step: broken, loses } if *broken == step => Some(*loses),
                _ => None,
            })
        })
    }
}

/// As the driver that was measured tells it: of no state in between.
fn shown(stage: Stage) -> ProcessState {
    match stage {
        Stage::Running => ProcessState::Running,
        Stage::Locked | Stage::Leaving => ProcessState::Locked,
        Stage::Checkpointed | Stage::Coming => ProcessState::Checkpointed,
        Stage::Failed => ProcessState::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::config::Config;
    use crate::fault::Fault;
    use crate::identity::Identity;
    use crate::protocol::{MemoryKind, ProcessList, Reply};

    const GIB: u64 = 1 << 30;
    const WHOLE: Region = Region { device: 0, instance: None };
    use CheckpointStep::{Checkpoint, Lock, Restore, Unlock};

    fn driver(json: &str) -> Driver {
        Driver::new(Config::from_json(json).unwrap())
    }

    fn connect(driver: &mut Driver, pid: u32) -> ClientId {
        let client = driver.connect(Identity { pid, namespaces: vec![(1, pid)] });
        let attach = Request::Attach { devices: vec![0], lists: vec![ProcessList::Compute] };
        driver.answer(client, attach, Instant::now()).unwrap();
        client
    }

    fn made(driver: &mut Driver, client: ClientId, request: Request) -> u64 {
        match driver.answer(client, request, Instant::now()) {
            Ok(Reply::Made(id)) => id,
            other => panic!("{other:?}"),
        }
    }

    fn allocate(driver: &mut Driver, client: ClientId, kind: MemoryKind, bytes: u64) -> u64 {
        made(driver, client, Request::Allocate { region: WHOLE, kind, bytes, context: None })
    }

    fn used(driver: &mut Driver, client: ClientId) -> u64 {
        match driver.answer(client, Request::Memory(WHOLE), Instant::now()) {
            Ok(Reply::Memory(memory)) => memory.used,
            other => panic!("{other:?}"),
        }
    }

    fn step(driver: &mut Driver, asker: ClientId, step: CheckpointStep) -> Result<(), Failure> {
        let begun = driver.begin_step(asker, 10, step)?;
        driver.end_step(&begun)
    }

    const BARE: &str = r#"{"contextOverhead": 0, "openOverhead": 0}"#;

    #[test]
    fn a_process_goes_to_the_host_and_comes_back_as_it_was() {
        let mut driver = driver(BARE);
        let (mover, process) = (connect(&mut driver, 1), connect(&mut driver, 10));
        let context = made(&mut driver, process, Request::CreateContext(WHOLE));
        let piece = allocate(&mut driver, process, MemoryKind::Plain, 5 * GIB);
        allocate(&mut driver, process, MemoryKind::Physical, GIB);
        let before = driver.answer(mover, Request::Control(crate::protocol::Control::Show), Instant::now());
        let whole = used(&mut driver, mover);
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Running));
        for (wrong, _) in [(Checkpoint, 0), (Restore, 0), (Unlock, 0)] {
            assert_eq!(step(&mut driver, mover, wrong), Err(Failure::OtherState));
        }
        step(&mut driver, mover, Lock).unwrap();
        assert!(driver.is_stopped(process, &Request::Free(piece)));
        assert!(!driver.is_stopped(mover, &Request::Free(piece)));
        assert_eq!(used(&mut driver, mover), whole, "locked is still on the device");
        step(&mut driver, mover, Checkpoint).unwrap();
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Checkpointed));
        assert_eq!(used(&mut driver, mover), 0);
        let bytes = 6 * GIB + (518 << 20);
        assert_eq!(driver.stopped(), [Stopped { pid: 10, state: ProcessState::Checkpointed, bytes }]);
        step(&mut driver, mover, Restore).unwrap();
        step(&mut driver, mover, Unlock).unwrap();
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Running));
        let after = driver.answer(mover, Request::Control(crate::protocol::Control::Show), Instant::now());
        assert_eq!(after, before);
        for held in [piece, context] {
            driver.answer(process, Request::Free(held), Instant::now()).unwrap();
        }
        driver.disconnect(process, Instant::now());
        driver.leaving.clear();
        assert_eq!(used(&mut driver, mover), 0);
    }

    #[test]
    fn without_room_it_stays_on_the_host_until_there_is() {
        let mut driver = driver(
            r#"{"contextOverhead": 0, "openOverhead": 0, "context": 0,
            "devices": [{"memory": "8Gi", "reserved": 0}]}"#,
        );
        let (mover, process, other) =
            (connect(&mut driver, 1), connect(&mut driver, 10), connect(&mut driver, 20));
        allocate(&mut driver, process, MemoryKind::Plain, 5 * GIB);
        step(&mut driver, mover, Lock).unwrap();
        step(&mut driver, mover, Checkpoint).unwrap();
        let taken = allocate(&mut driver, other, MemoryKind::Plain, 4 * GIB);
        assert_eq!(step(&mut driver, mover, Restore), Err(Failure::OutOfMemory));
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Checkpointed));
        assert_eq!(used(&mut driver, mover), 4 * GIB);
        driver.answer(other, Request::Free(taken), Instant::now()).unwrap();
        step(&mut driver, mover, Restore).unwrap();
        step(&mut driver, mover, Unlock).unwrap();
        assert_eq!(used(&mut driver, mover), 5 * GIB);
    }

    #[test]
    fn what_was_imported_does_not_come_back_and_the_process_is_lost() {
        let mut driver = driver(BARE);
        let (mover, process, maker) =
            (connect(&mut driver, 1), connect(&mut driver, 10), connect(&mut driver, 20));
        let piece = allocate(&mut driver, maker, MemoryKind::Physical, GIB);
        driver.export(maker, piece).unwrap();
        driver.import(process, piece).unwrap();
        step(&mut driver, mover, Lock).unwrap();
        step(&mut driver, mover, Checkpoint).unwrap();
        assert_eq!(used(&mut driver, mover), GIB, "its maker holds it");
        assert_eq!(step(&mut driver, mover, Restore), Err(Failure::NotSupported));
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Failed));
        assert_eq!(step(&mut driver, mover, Unlock), Err(Failure::OtherState));
        driver.disconnect(process, Instant::now());
        assert_eq!(driver.process_state(mover, 10), Err(Failure::NoSuchProcess));
    }

    #[test]
    fn a_step_may_fail_and_lose_the_process() {
        for (broken, loses) in [(Lock, false), (Checkpoint, false), (Checkpoint, true), (Restore, true)] {
            let mut driver = driver(BARE);
            let (mover, process) = (connect(&mut driver, 1), connect(&mut driver, 10));
            allocate(&mut driver, process, MemoryKind::Plain, GIB);
            let kind = FaultKind::Checkpoint { step: broken, loses };
            driver.inject(Fault { region: WHOLE, kind }, None).unwrap();
            let failed = [Lock, Checkpoint, Restore]
                .into_iter()
                .find_map(|one| step(&mut driver, mover, one).err().map(|failure| (one, failure)));
            let expected = if broken == Lock { Failure::NotLocked } else { Failure::NotSupported };
            assert_eq!(failed, Some((broken, expected)));
            assert_eq!(driver.process_state(mover, 10) == Ok(ProcessState::Failed), loses, "{broken:?}");
        }
    }

    #[test]
    fn older_drivers_cannot() {
        let mut driver = driver(r#"{"driverVersion": "565.57.01"}"#);
        let mover = connect(&mut driver, 1);
        connect(&mut driver, 10);
        assert_eq!(driver.process_state(mover, 10), Err(Failure::NotSupported));
        assert_eq!(step(&mut driver, mover, Lock), Err(Failure::NotSupported));
    }

    #[test]
    fn who_dies_on_the_host_leaves_nothing() {
        let mut driver = driver(BARE);
        let (mover, process) = (connect(&mut driver, 1), connect(&mut driver, 10));
        made(&mut driver, process, Request::CreateContext(WHOLE));
        allocate(&mut driver, process, MemoryKind::Plain, GIB);
        step(&mut driver, mover, Lock).unwrap();
        let begun = driver.begin_step(mover, 10, Checkpoint).unwrap();
        assert_eq!(driver.process_state(mover, 10), Ok(ProcessState::Locked), "until it is done");
        assert_eq!(step(&mut driver, mover, Unlock), Err(Failure::OtherState));
        driver.end_step(&begun).unwrap();
        driver.disconnect(process, Instant::now());
        assert_eq!(driver.process_state(mover, 10), Err(Failure::NoSuchProcess));
        assert!(driver.leaving.is_empty());
        assert_eq!(used(&mut driver, mover), 0);
    }
}
