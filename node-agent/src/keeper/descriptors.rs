//! What a keeper holds: the chunks of each device, and what it stores for the agent. A descriptor
//! is memory: closing the last one frees it.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use highwater_policy::pool::ladder;

/// A descriptor. Shared only while a reply that carries it is on its way.
pub(crate) type Descriptor = Arc<OwnedFd>;

/// Everything.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    /// The chunks by the UUID of their device.
    pub(crate) devices: BTreeMap<String, Chunks>,
    /// The descriptors that are kept for the agent, by key.
    pub(crate) stored: BTreeMap<String, Vec<Descriptor>>,
    /// Whether the keeper stands down.
    pub(crate) stand_down: bool,
}

/// The chunks of a device, by their size in bytes.
#[derive(Debug, Default)]
pub(crate) struct Chunks(BTreeMap<u64, Vec<Descriptor>>);

impl Chunks {
    /// Takes a chunk.
    pub(crate) fn add(&mut self, size: u64, descriptor: OwnedFd) {
        self.0.entry(size).or_default().push(Arc::new(descriptor));
    }

    /// Bytes of all chunks.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes().fold(0, |bytes, (size, count)| bytes.saturating_add(size.saturating_mul(count)))
    }

    /// How many there are of each size.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|(size, chunks)| (*size, u64::try_from(chunks.len()).unwrap_or(u64::MAX)))
    }

    /// The same for the planner, which knows the sizes of the ladder.
    pub(crate) fn on_ladder(&self) -> ladder::Chunks {
        let mut counts = ladder::Chunks::NONE;
        for (size, count) in self.sizes() {
            // Of a size that is not on the ladder, nothing is added.
            counts.add(size, u32::try_from(count).unwrap_or(u32::MAX));
        }
        counts
    }

    /// Gives up what the planner chose; returns it with its size.
    pub(crate) fn take(&mut self, chosen: &ladder::Chunks) -> (Vec<Descriptor>, u64) {
        let (mut taken, mut bytes) = (Vec::new(), 0_u64);
        for (size, count) in chosen.iter() {
            let Some(chunks) = self.0.get_mut(&size) else { continue };
            let keep = chunks.len().saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
            let gone = chunks.split_off(keep);
            bytes = bytes.saturating_add(size.saturating_mul(u64::try_from(gone.len()).unwrap_or(0)));
            taken.extend(gone);
            if chunks.is_empty() {
                self.0.remove(&size);
            }
        }
        (taken, bytes)
    }

    /// Gives up everything.
    pub(crate) fn take_all(&mut self) -> (Vec<Descriptor>, u64) {
        let bytes = self.bytes();
        (std::mem::take(&mut self.0).into_values().flatten().collect(), bytes)
    }

    /// Each chunk with its size.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Descriptor)> {
        self.0.iter().flat_map(|(size, chunks)| chunks.iter().map(|chunk| (*size, chunk)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn descriptor() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn what_is_taken_is_no_longer_held() {
        let mut chunks = Chunks::default();
        for size in [1024 * MIB, 1024 * MIB, 2 * MIB, 3 * MIB] {
            chunks.add(size, descriptor());
        }
        assert_eq!(chunks.bytes(), 2053 * MIB);
        let ladder = chunks.on_ladder();
        assert_eq!((ladder.count(1024 * MIB), ladder.count(2 * MIB), ladder.bytes()), (2, 1, 2050 * MIB));
        let mut chosen = ladder::Chunks::NONE;
        chosen.add(1024 * MIB, 1);
        chosen.add(64 * MIB, 1);
        let (taken, bytes) = chunks.take(&chosen);
        assert_eq!((taken.len(), bytes, chunks.bytes()), (1, 1024 * MIB, 1029 * MIB));
        let (taken, bytes) = chunks.take_all();
        assert_eq!((taken.len(), bytes, chunks.bytes()), (3, 1029 * MIB, 0));
        assert_eq!(chunks.iter().count(), 0);
    }
}
