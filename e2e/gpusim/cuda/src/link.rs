//! The other end of the library: the daemon, or nothing.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Instant;

use gpusim::client::{CallError, Client, socket_path};
use gpusim::config::Config;
use gpusim::driver::Driver;
use gpusim::identity::Identity;
use gpusim::protocol::{Failure, Reply, Request};

use crate::code::Code;

/// Where it is 1 there is no daemon and nothing is kept: each call succeeds at once, allocations
/// with addresses that are made up. What a call costs then is the cost of whatever stands between
/// program and driver. No program of the real driver reads it.
const NULL_VARIABLE: &str = "GPUSIM_NULL";

/// Whether there is nothing at the other end.
pub(crate) fn is_null() -> bool {
    static NULL: OnceLock<bool> = OnceLock::new();
    *NULL.get_or_init(|| std::env::var_os(NULL_VARIABLE).is_some_and(|value| value == "1"))
}

/// What answers requests.
pub(crate) enum Link {
    Daemon(Client),
    Null {
        /// Answers what does not depend on who holds what.
        driver: Box<Driver>,
        last_id: u64,
    },
}

impl Link {
    pub(crate) fn open() -> Result<Self, Code> {
        if is_null() {
            return Ok(Self::Null { driver: Box::new(Driver::new(Config::default())), last_id: 0 });
        }
        Client::connect(&socket_path()).map(Self::Daemon).map_err(|_| Code::NoDevice)
    }

    pub(crate) fn call(&mut self, request: &Request) -> Result<Reply, CallError> {
        let (driver, last_id) = match self {
            Self::Daemon(client) => return client.call(request),
            Self::Null { driver, last_id } => (driver, last_id),
        };
        match request {
            Request::CreateContext(_) | Request::Allocate { .. } => {
                *last_id += 1;
                Ok(Reply::Made(*last_id))
            }
            Request::Inventory | Request::Check(_) | Request::Memory(_) => {
                let nobody = driver.connect(Identity::default());
                let reply = driver.answer(nobody, request.clone(), Instant::now());
                driver.disconnect(nobody, Instant::now());
                reply.map_err(CallError::Refused)
            }
            Request::MemoryWithinLimits(region) => self.call(&Request::Memory(*region)),
            Request::Import(_) | Request::Open(_) => Err(CallError::Refused(Failure::NotShareable)),
            _ => Ok(Reply::Done),
        }
    }

    pub(crate) fn export(&mut self, allocation: u64) -> Result<OwnedFd, CallError> {
        match self {
            Self::Daemon(client) => client.export(allocation),
            Self::Null { .. } => Err(CallError::Refused(Failure::NotSupported)),
        }
    }
}
