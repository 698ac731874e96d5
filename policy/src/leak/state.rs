//! What a detector remembers, for a file that may be cut off.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    leak::{Detector, Profile, Settings, detector::Live},
    time::Millis,
};

/// Changes when what is remembered means something else.
const VERSION: u32 = 3;
/// Bytes of the digest that ends a saved state.
const DIGEST: usize = 32;

/// What the detector remembers, for a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    version: u32,
    /// Lengths that the blocks had.
    block_milliseconds: Vec<u64>,
    profile: Profile,
    live: Box<Live>,
}

/// The only field that every version has.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Why a state was not taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Another version wrote it.
    #[error("the saved state has version {0}; it is begun anew")]
    Version(u32),
    /// It is cut off or damaged.
    #[error("the saved state is cut off or damaged; it is begun anew")]
    Damaged,
}

impl State {
    /// As bytes that show when they were cut off or changed.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        bytes
    }

    /// From bytes that [`Self::to_bytes`] made.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateError> {
        let at = bytes.len().checked_sub(DIGEST).ok_or(StateError::Damaged)?;
        let (body, digest) = bytes.split_at_checked(at).ok_or(StateError::Damaged)?;
        if Sha256::digest(body).as_slice() != digest {
            return Err(StateError::Damaged);
        }
        let Versioned { version } = serde_json::from_slice(body).map_err(|_| StateError::Damaged)?;
        if version != VERSION {
            return Err(StateError::Version(version));
        }
        serde_json::from_slice(body).map_err(|_| StateError::Damaged)
    }
}

impl Detector {
    /// What it remembers.
    pub fn state(&self) -> State {
        State {
            version: VERSION,
            block_milliseconds: self.settings.block_milliseconds.to_vec(),
            profile: self.profile.clone(),
            live: Box::new(self.live.clone()),
        }
    }

    /// Goes on from what was remembered. Where the blocks have other lengths now, or the state is
    /// of a time that the samples' clock has not reached, only the profile is kept.
    pub fn restore(settings: Arc<Settings>, state: State, now: Millis) -> Result<Self, StateError> {
        if state.version != VERSION {
            return Err(StateError::Version(state.version));
        }
        let mut detector = Self::with_profile(settings, state.profile);
        let same = state.block_milliseconds == detector.settings.block_milliseconds;
        if same && state.live.last.is_none_or(|last| last <= now.0) {
            detector.live = *state.live;
        }
        Ok(detector)
    }
}
