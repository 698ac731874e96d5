//! What the process holds, by pointer and handle.
//!
//! Open addressing in memory of its own, in shards with a lock each. Finding, adding and removing
//! cost the same however much is held, and removing leaves no tombstones that would slow down what
//! comes after. The first value of a table is all zeroes, so a fork leaves an empty one.

use core::mem::size_of;
use core::ptr::NonNull;

use crate::sys::{self, Guard, Mutex, Zeroed};

/// What a key stands for: numbers of different kinds may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Space {
    /// A device pointer of an allocation.
    Pointer = 1,
    /// A CUDA array.
    Array,
    /// A mipmapped array.
    Mipmap,
    /// A context that the program made.
    Context,
    /// A handle of `cuMemCreate` and its like.
    Handle,
    /// Physical memory, by number.
    Memory,
    /// Where physical memory is mapped, by the first address.
    Mapping,
    /// An array or multicast object that keeps physical memory alive.
    Pin,
    /// A green context.
    Green,
    /// A descriptor that keeps physical memory alive, by number.
    Export,
    /// An executable graph, on one device.
    Graph,
    /// Memory that a limit of a context sets aside.
    Heap,
    /// A block that small allocations share, by address.
    Block,
}

/// How the memory of an entry is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// With its context.
    Plain = 0,
    /// The same, and what is charged is the block that it is in.
    Small,
    /// To its pool, whatever becomes of the context.
    Pool,
    /// Memory of another process, mapped here.
    Imported,
}

/// Something that is held. What `bytes`, `owner` and `more` mean is up to the space.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Entry {
    /// Pointer, handle or number.
    pub(crate) key: u64,
    /// Bytes that are charged, or a size.
    pub(crate) bytes: u64,
    /// What it belongs to.
    pub(crate) owner: u64,
    /// Depends on the space.
    pub(crate) more: u64,
    /// Uses, where they are counted.
    pub(crate) uses: u32,
    /// Ordinal of the device in this process.
    pub(crate) device: u8,
    /// How it is given back.
    pub(crate) kind: Kind,
    /// Depends on the space.
    pub(crate) flag: u8,
    /// 0 where there is no entry.
    pub(crate) space: u8,
}

impl Entry {
    /// An entry with that key and nothing else.
    pub(crate) fn new(space: Space, key: u64) -> Self {
        Self {
            key,
            bytes: 0,
            owner: 0,
            more: 0,
            uses: 0,
            device: 0,
            kind: Kind::Plain,
            flag: 0,
            space: space as u8,
        }
    }

    /// Whether it is of that space.
    pub(crate) fn is(&self, space: Space) -> bool {
        self.space == space as u8
    }

    fn is_empty(&self) -> bool {
        self.space == 0
    }
}

const SHARD_BITS: u32 = 5;
const SHARDS: usize = 1 << SHARD_BITS;
const FIRST_CAPACITY: usize = 64;

/// One part of the table.
#[repr(C)]
struct Shard {
    /// Address of the entries; null while there are none.
    entries: Option<NonNull<Entry>>,
    /// A power of two, or 0.
    capacity: usize,
    used: usize,
}

// SAFETY: a null pointer is `None`, and the rest are numbers.
unsafe impl Zeroed for Shard {}
// SAFETY: the entries belong to the shard alone.
unsafe impl Send for Shard {}

/// There is no memory for another entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// What the process holds.
#[repr(C)]
pub(crate) struct Table {
    shards: [Mutex<Shard>; SHARDS],
}

// SAFETY: an array of what is zeroed.
unsafe impl Zeroed for Table {}

fn hash(space: u8, key: u64) -> u64 {
    // The finaliser of a well-known mixing function: pointers differ in few bits.
    let mut mixed = key ^ (u64::from(space) << 56);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

/// Where an entry would best be; the shard was chosen by other bits.
fn home(space: u8, key: u64, mask: usize) -> usize {
    usize::try_from(hash(space, key) & sys::bytes(mask)).unwrap_or(0)
}

impl Shard {
    fn entries(&mut self) -> &mut [Entry] {
        match self.entries {
            // SAFETY: the shard owns a mapping of so many entries, all of them initialised (zeroes
            // are an empty entry).
            Some(entries) => unsafe { core::slice::from_raw_parts_mut(entries.as_ptr(), self.capacity) },
            None => &mut [],
        }
    }

    /// Where an entry is.
    fn find(&mut self, space: u8, key: u64) -> Option<usize> {
        let mask = self.capacity.checked_sub(1)?;
        let mut at = home(space, key, mask);
        let entries = self.entries();
        loop {
            let entry = entries.get(at)?;
            if entry.is_empty() {
                return None;
            }
            if entry.key == key && entry.space == space {
                return Some(at);
            }
            at = (at + 1) & mask;
        }
    }

    /// Puts an entry where its key is not yet. There must be room.
    fn put(&mut self, entry: Entry) {
        let Some(mask) = self.capacity.checked_sub(1) else { return };
        let mut at = home(entry.space, entry.key, mask);
        while let Some(place) = self.entries().get_mut(at) {
            if place.is_empty() {
                *place = entry;
                self.used += 1;
                return;
            }
            at = (at + 1) & mask;
        }
    }

    /// Takes out what is at `hole`, and closes the gap.
    fn remove(&mut self, mut hole: usize) -> Option<Entry> {
        let mask = self.capacity.checked_sub(1)?;
        let entries = self.entries();
        let removed = *entries.get(hole)?;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let next = *entries.get(at)?;
            if next.is_empty() {
                break;
            }
            // It may move back to the hole unless that lies before its home.
            let from_home = at.wrapping_sub(home(next.space, next.key, mask)) & mask;
            if from_home >= (at.wrapping_sub(hole) & mask) {
                *entries.get_mut(hole)? = next;
                hole = at;
            }
        }
        entries.get_mut(hole)?.space = 0;
        self.used = self.used.saturating_sub(1);
        Some(removed)
    }

    /// Makes room for one more.
    fn reserve(&mut self) -> Result<(), NoRoom> {
        if self.used.saturating_add(1).saturating_mul(4) <= self.capacity.saturating_mul(3) {
            return Ok(());
        }
        let capacity = self.capacity.saturating_mul(2).max(FIRST_CAPACITY);
        let bytes = capacity.checked_mul(size_of::<Entry>()).ok_or(NoRoom)?;
        let memory = sys::map(bytes).ok_or(NoRoom)?;
        sys::keep_from_children(memory, bytes);
        let mut larger = Self { entries: Some(memory.cast()), capacity, used: 0 };
        for entry in self.entries().iter().filter(|entry| !entry.is_empty()) {
            larger.put(*entry);
        }
        if let Some(old) = self.entries {
            // SAFETY: everything was copied, and the lock of the shard is held.
            unsafe { sys::unmap(old.cast(), self.capacity.saturating_mul(size_of::<Entry>())) };
        }
        *self = larger;
        Ok(())
    }
}

impl Table {
    fn shard(&self, space: u8, key: u64) -> Option<Guard<'_, Shard>> {
        let index = usize::try_from(hash(space, key) >> (u64::BITS - SHARD_BITS)).ok()?;
        self.shards.get(index).map(Mutex::lock)
    }

    /// Adds an entry, or replaces the one with its key, which is returned.
    pub(crate) fn insert(&self, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let mut shard = self.shard(entry.space, entry.key).ok_or(NoRoom)?;
        if let Some(at) = shard.find(entry.space, entry.key)
            && let Some(place) = shard.entries().get_mut(at)
        {
            return Ok(Some(core::mem::replace(place, entry)));
        }
        shard.reserve()?;
        shard.put(entry);
        Ok(None)
    }

    /// A copy of an entry.
    pub(crate) fn get(&self, space: Space, key: u64) -> Option<Entry> {
        let mut shard = self.shard(space as u8, key)?;
        let at = shard.find(space as u8, key)?;
        shard.entries().get(at).copied()
    }

    /// Takes an entry out.
    pub(crate) fn take(&self, space: Space, key: u64) -> Option<Entry> {
        let mut shard = self.shard(space as u8, key)?;
        let at = shard.find(space as u8, key)?;
        shard.remove(at)
    }

    /// Changes an entry; returns what it is then.
    pub(crate) fn change(&self, space: Space, key: u64, change: impl FnOnce(&mut Entry)) -> Option<Entry> {
        let mut shard = self.shard(space as u8, key)?;
        let at = shard.find(space as u8, key)?;
        let entry = shard.entries().get_mut(at)?;
        change(entry);
        Some(*entry)
    }

    /// Looks at every entry. Its shard is locked meanwhile.
    pub(crate) fn each(&self, mut visit: impl FnMut(&Entry)) {
        for shard in &self.shards {
            shard.lock().entries().iter().filter(|entry| !entry.is_empty()).for_each(&mut visit);
        }
    }

    /// Changes any entry. Its shard is locked meanwhile.
    pub(crate) fn each_mut(&self, mut visit: impl FnMut(&mut Entry)) {
        for shard in &self.shards {
            shard.lock().entries().iter_mut().filter(|entry| !entry.is_empty()).for_each(&mut visit);
        }
    }

    /// Takes every entry out that is `wanted`, and passes it on. Its shard is locked meanwhile.
    pub(crate) fn drain(&self, wanted: impl Fn(&Entry) -> bool, mut visit: impl FnMut(Entry)) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let mut at = 0;
            while let Some(entry) = shard.entries().get(at).copied() {
                if entry.is_empty() || !wanted(&entry) {
                    at += 1;
                } else if let Some(entry) = shard.remove(at) {
                    // What closed the gap is looked at next; if it came round the end, for the
                    // second time, which does no harm.
                    visit(entry);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use core::mem::MaybeUninit;
    use std::collections::HashMap;

    use super::*;

    fn empty() -> Box<Table> {
        // SAFETY: a table is zeroed.
        Box::new(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    fn entry(space: Space, key: u64, bytes: u64) -> Entry {
        Entry { bytes, ..Entry::new(space, key) }
    }

    fn count(table: &Table) -> usize {
        let mut count = 0;
        table.each(|_| count += 1);
        count
    }

    #[test]
    fn what_is_put_in_is_found_until_it_is_taken_out() {
        let table = empty();
        let mut model = HashMap::new();
        let mut random = 7_u64;
        for _ in 0..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = (random >> 40) % 5000 * 0x20_0000;
            let space = if random & 1 == 0 { Space::Pointer } else { Space::Handle };
            if random & 6 == 0 {
                let taken = table.take(space, key).map(|entry| entry.bytes);
                assert_eq!(taken, model.remove(&(space as u8, key)));
            } else {
                let old = table.insert(entry(space, key, random)).unwrap().map(|entry| entry.bytes);
                assert_eq!(old, model.insert((space as u8, key), random));
            }
        }
        assert_eq!(count(&table), model.len());
        for ((space, key), bytes) in model {
            let space = if space == Space::Pointer as u8 { Space::Pointer } else { Space::Handle };
            assert_eq!(table.get(space, key).unwrap().bytes, bytes);
        }
    }

    #[test]
    fn equal_numbers_of_two_kinds_are_two_entries() {
        let table = empty();
        table.insert(entry(Space::Array, 5, 1)).unwrap();
        table.insert(entry(Space::Mipmap, 5, 2)).unwrap();
        assert_eq!(table.take(Space::Array, 5).unwrap().bytes, 1);
        assert_eq!(table.get(Space::Mipmap, 5).unwrap().bytes, 2);
    }

    #[test]
    fn draining_takes_all_that_is_wanted_and_leaves_the_rest() {
        let table = empty();
        for key in 0..10_000 {
            table.insert(entry(Space::Pointer, key << 21, key)).unwrap();
        }
        let mut drained = 0;
        table.drain(|entry| entry.bytes % 3 == 0, |_| drained += 1);
        assert_eq!(drained, 3334);
        assert_eq!(count(&table), 6666);
        assert!((0..10_000).all(|key| table.get(Space::Pointer, key << 21).is_some() == (key % 3 != 0)));
    }

    #[test]
    fn a_change_is_kept() {
        let table = empty();
        table.insert(entry(Space::Memory, 1, 0)).unwrap();
        table.change(Space::Memory, 1, |entry| entry.uses += 2);
        assert_eq!(table.get(Space::Memory, 1).unwrap().uses, 2);
        assert!(table.change(Space::Memory, 2, |_| ()).is_none());
    }
}
