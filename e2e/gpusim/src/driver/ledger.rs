//! Who holds what: contexts and pieces of memory, and the sums that follow from them.
//!
//! The sums are kept up to date at each change, so that asking costs the same whether a process
//! holds ten allocations or a hundred thousand.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;

use super::ClientId;
use crate::identity::Identity;
use crate::protocol::{MemoryKind, ProcessList, Region};

/// Everything that is held.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    clients: BTreeMap<ClientId, Client>,
    pieces: BTreeMap<u64, Piece>,
    /// Bytes on the devices, by the region that they were taken from.
    used: BTreeMap<Region, u64>,
    /// Bytes on the devices, but for managed memory, by device and the cgroup of whoever made them.
    made_by: BTreeMap<(u32, Arc<str>), u64>,
    /// Pieces whose charge depends on who else holds them.
    shared: BTreeSet<u64>,
    managed: BTreeSet<u64>,
    last_id: u64,
}

/// A process that is connected.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) identity: Identity,
    pub(super) lists: Vec<ProcessList>,
    /// Indices of the devices that it has open for CUDA.
    pub(super) open: Vec<u32>,
    /// Path of its cgroup, as last seen.
    pub(super) cgroup: Arc<str>,
    pub(super) stage: Stage,
    holdings: BTreeMap<u64, Holding>,
    sums: BTreeMap<Region, Sums>,
    image: Option<Image>,
}

/// Where a process is on its way to the host and back.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Running,
    Locked,
    /// On the way to the host.
    Leaving,
    Checkpointed,
    /// On the way back.
    Coming,
    Failed,
}

/// What a checkpointed process has on the host.
#[derive(Debug, Default)]
struct Image {
    contexts: Vec<(u64, Context)>,
    pieces: Vec<(u64, Option<u64>, Piece)>,
    /// Devices that it had open.
    open: Vec<u32>,
    /// It shared memory with others, which does not come back.
    shared: bool,
}

/// What a process has in a region by itself.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    contexts: u32,
    /// What the contexts cost.
    context_bytes: u64,
    /// Memory that it alone holds, but for managed memory.
    own: u64,
}

#[derive(Debug)]
struct Holding {
    what: Held,
    /// The context whose end frees it too.
    context: Option<u64>,
}

#[derive(Debug, Clone)]
enum Held {
    Context(Context),
    /// A share in a piece: its maker's, or another's.
    Piece(u64),
}

#[derive(Debug, Clone)]
struct Context {
    region: Region,
    /// Charged to the process.
    size: u64,
    /// On the device besides, for nobody's account.
    overhead: u64,
    cgroup: Arc<str>,
}

/// A piece of memory: it lives as long as any process holds it or any descriptor keeps it.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) region: Region,
    pub(super) kind: MemoryKind,
    /// What was asked for.
    pub(super) size: u64,
    /// What is on the device.
    pub(super) resident: u64,
    /// Its maker, if it still holds it, and then the others in the order of their coming; once for
    /// each of their holdings.
    holders: Vec<ClientId>,
    /// Descriptors that keep it.
    descriptors: u32,
    /// It has been shared by a descriptor.
    exported: bool,
    /// No process is ever charged: its maker had no context when it shared it.
    uncharged: bool,
    /// Cgroup of its maker when it was made.
    cgroup: Arc<str>,
}

impl Piece {
    fn is_alive(&self) -> bool {
        self.descriptors > 0 || !self.holders.is_empty()
    }

    /// Its only holder, where nobody else can get at it.
    fn owner(&self) -> Option<ClientId> {
        match self.holders.as_slice() {
            [owner] if !self.exported => Some(*owner),
            _ => None,
        }
    }
}

/// Memory of a process that ended: what it was charged for in a region, and what nobody was.
pub(super) type Left = BTreeMap<Region, (u64, u64)>;

/// What a process holds in a region, for people.
#[derive(Debug, Default)]
pub(super) struct Summary {
    pub(super) contexts: u32,
    pub(super) charged: u64,
    pub(super) uncharged: u64,
}

impl Ledger {
    pub(super) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn connect(&mut self, identity: Identity) -> ClientId {
        let id = self.new_id();
        let client = Client {
            identity,
            lists: Vec::new(),
            open: Vec::new(),
            cgroup: "/".into(),
            stage: Stage::Running,
            holdings: BTreeMap::new(),
            sums: BTreeMap::new(),
            image: None,
        };
        self.clients.insert(id, client);
        id
    }

    pub(super) fn client(&self, id: ClientId) -> Option<&Client> {
        self.clients.get(&id)
    }

    pub(super) fn client_mut(&mut self, id: ClientId) -> Option<&mut Client> {
        self.clients.get_mut(&id)
    }

    /// A process is gone, and what it alone held with it.
    pub(super) fn disconnect(&mut self, id: ClientId) -> Option<(Client, Left)> {
        let mut left = Left::new();
        let client = self.clients.get(&id)?;
        let holdings: Vec<_> =
            client.holdings.iter().map(|(id, holding)| (*id, holding.what.clone())).collect();
        // The charges as they are while the process still has its contexts.
        let mut seen = BTreeSet::new();
        for (_, held) in &holdings {
            match held {
                Held::Context(context) => {
                    let (charged, uncharged) = left.entry(context.region).or_default();
                    *charged += context.size;
                    *uncharged += context.overhead;
                }
                Held::Piece(id_of_piece) => {
                    let Some(piece) = self.pieces.get(id_of_piece) else { continue };
                    let dies = piece.descriptors == 0 && piece.holders.iter().all(|holder| *holder == id);
                    // It may hold the same piece twice.
                    if dies && seen.insert(*id_of_piece) {
                        let (charged, uncharged) = left.entry(piece.region).or_default();
                        let sum = if self.charged(piece) == Some(id) { charged } else { uncharged };
                        *sum += piece.resident;
                    }
                }
            }
        }
        // Contexts last: their end would free the rest, each by a search.
        let (contexts, pieces): (Vec<_>, Vec<_>) =
            holdings.into_iter().partition(|(_, held)| matches!(held, Held::Context(_)));
        for (holding, _) in pieces.into_iter().chain(contexts) {
            self.drop_holding(id, holding);
        }
        Some((self.clients.remove(&id)?, left))
    }

    /// Puts a context on the device.
    pub(super) fn add_context(
        &mut self,
        client: ClientId,
        region: Region,
        size: u64,
        overhead: u64,
    ) -> Option<u64> {
        let id = self.new_id();
        let cgroup = self.clients.get(&client)?.cgroup.clone();
        let context = Context { region, size, overhead, cgroup };
        self.count_context(client, &context, true);
        let holding = Holding { what: Held::Context(context), context: None };
        self.clients.get_mut(&client)?.holdings.insert(id, holding);
        Some(id)
    }

    /// Puts memory on the device. The piece and its maker's share have the same number.
    pub(super) fn add_piece(
        &mut self,
        client: ClientId,
        (region, kind): (Region, MemoryKind),
        (size, resident): (u64, u64),
        context: Option<u64>,
    ) -> Option<u64> {
        let id = self.new_id();
        let cgroup = self.clients.get(&client)?.cgroup.clone();
        let piece = Piece {
            region,
            kind,
            size,
            resident,
            holders: vec![client],
            descriptors: 0,
            exported: false,
            uncharged: false,
            cgroup,
        };
        self.count(id, &piece, true);
        self.pieces.insert(id, piece);
        let holding = Holding { what: Held::Piece(id), context };
        self.clients.get_mut(&client)?.holdings.insert(id, holding);
        Some(id)
    }

    /// Takes a share in a piece.
    pub(super) fn join(&mut self, client: ClientId, piece: u64) -> Option<u64> {
        if !self.clients.contains_key(&client) {
            return None;
        }
        let id = self.new_id();
        self.change(piece, |piece| piece.holders.push(client))?;
        let holding = Holding { what: Held::Piece(piece), context: None };
        self.clients.get_mut(&client)?.holdings.insert(id, holding);
        Some(id)
    }

    /// Where a holding is.
    pub(super) fn place(&self, client: ClientId, holding: u64) -> Option<Region> {
        match &self.clients.get(&client)?.holdings.get(&holding)?.what {
            Held::Context(context) => Some(context.region),
            Held::Piece(piece) => Some(self.pieces.get(piece)?.region),
        }
    }

    /// The piece behind a process's own allocation, not behind a share in another's.
    pub(super) fn made(&self, client: ClientId, holding: u64) -> Option<&Piece> {
        match self.clients.get(&client)?.holdings.get(&holding)?.what {
            Held::Piece(piece) if piece == holding => self.pieces.get(&piece),
            _ => None,
        }
    }

    pub(super) fn piece(&self, id: u64) -> Option<&Piece> {
        self.pieces.get(&id)
    }

    /// Whether a process holds a piece.
    pub(super) fn holds(&self, client: ClientId, piece: u64) -> bool {
        self.pieces.get(&piece).is_some_and(|piece| piece.holders.contains(&client))
    }

    /// Whether a piece is its maker's alone.
    pub(super) fn is_private(&self, piece: u64) -> bool {
        self.pieces.get(&piece).is_some_and(|piece| piece.owner().is_some())
    }

    /// Changes the size of a piece, and what of it is on the device.
    pub(super) fn resize(&mut self, piece: u64, size: u64, resident: u64) {
        self.change(piece, |piece| (piece.size, piece.resident) = (size, resident));
    }

    /// Another descriptor keeps a piece of the client's.
    pub(super) fn export(&mut self, client: ClientId, piece: u64) {
        let has_context = self
            .pieces
            .get(&piece)
            .zip(self.clients.get(&client))
            .is_some_and(|(piece, client)| client.has_context(piece.region));
        self.change(piece, |piece| {
            piece.uncharged |= !piece.exported && !has_context;
            piece.exported = true;
            piece.descriptors += 1;
        });
    }

    /// A descriptor that kept a piece is closed everywhere.
    pub(super) fn end_export(&mut self, piece: u64) {
        self.change(piece, |piece| piece.descriptors = piece.descriptors.saturating_sub(1));
    }

    /// Gives back a holding; with a context everything that was made in it.
    pub(super) fn release(&mut self, client: ClientId, holding: u64) {
        let Some(holdings) = self.clients.get(&client).map(|client| &client.holdings) else { return };
        if matches!(holdings.get(&holding), Some(Holding { what: Held::Context(_), .. })) {
            let inside = holdings.iter().filter(|(_, other)| other.context == Some(holding));
            let inside: Vec<u64> = inside.map(|(id, _)| *id).collect();
            for id in inside {
                self.drop_holding(client, id);
            }
        }
        self.drop_holding(client, holding);
    }

    /// The processes that have opened devices for CUDA, of those that are asked for.
    pub(super) fn using_cuda(&self, is_meant: impl Fn(&Identity) -> bool) -> Vec<ClientId> {
        let uses = |client: &Client| !client.open.is_empty() || client.image.is_some();
        let meant = self.clients.iter().filter(|(_, client)| uses(client) && is_meant(&client.identity));
        meant.map(|(id, _)| *id).collect()
    }

    /// Indices of the devices that a process has open, or had when it was checkpointed.
    pub(super) fn devices_of(&self, id: ClientId) -> Vec<u32> {
        let Some(client) = self.clients.get(&id) else { return Vec::new() };
        client.image.as_ref().map_or_else(|| client.open.clone(), |image| image.open.clone())
    }

    /// What a process has, on devices or on the host.
    pub(super) fn bytes_of(&self, id: ClientId) -> u64 {
        let Some(client) = self.clients.get(&id) else { return 0 };
        if let Some(image) = &client.image {
            return image.needed().values().sum();
        }
        let held = client.holdings.values().map(|holding| match &holding.what {
            Held::Context(context) => context.size,
            Held::Piece(piece) => self.pieces.get(piece).map_or(0, |piece| piece.resident),
        });
        held.sum()
    }

    /// Moves what a process has to the host. Of what others hold too, its share ends.
    pub(super) fn checkpoint(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| client.image.is_none()) else { return };
        let mut image = Image { open: std::mem::take(&mut client.open), ..Image::default() };
        let holdings = std::mem::take(&mut client.holdings);
        for (holding, Holding { what, context }) in holdings {
            match what {
                Held::Context(context) => image.contexts.push((holding, context)),
                Held::Piece(piece) => {
                    let own = self.pieces.get(&piece).is_some_and(|piece| piece.owner() == Some(id));
                    if own && let Some(moved) = self.pieces.remove(&piece) {
                        self.count(piece, &moved, false);
                        image.pieces.push((holding, context, moved));
                    } else if !own {
                        image.shared = true;
                        self.change(piece, |piece| {
                            if let Some(at) = piece.holders.iter().position(|holder| *holder == id) {
                                piece.holders.remove(at);
                            }
                        });
                    }
                }
            }
        }
        for (_, context) in &image.contexts {
            self.count_context(id, context, false);
        }
        if let Some(client) = self.clients.get_mut(&id) {
            client.image = Some(image);
        }
    }

    /// What a checkpointed process needs to come back, and whether it can.
    pub(super) fn image(&self, id: ClientId) -> Option<(BTreeMap<Region, u64>, bool)> {
        let image = self.clients.get(&id)?.image.as_ref()?;
        Some((image.needed(), !image.shared))
    }

    /// Puts a checkpointed process's memory back.
    pub(super) fn restore(&mut self, id: ClientId) {
        let Some(image) = self.clients.get_mut(&id).and_then(|client| client.image.take()) else { return };
        for (_, context) in &image.contexts {
            self.count_context(id, context, true);
        }
        for (holding, _, piece) in &image.pieces {
            self.count(*holding, piece, true);
        }
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.open = image.open;
        for (holding, context) in image.contexts {
            client.holdings.insert(holding, Holding { what: Held::Context(context), context: None });
        }
        for (holding, context, piece) in image.pieces {
            client.holdings.insert(holding, Holding { what: Held::Piece(holding), context });
            self.pieces.insert(holding, piece);
        }
    }

    /// A process is lost: what it had is nowhere.
    pub(super) fn lose(&mut self, id: ClientId) {
        self.checkpoint(id);
        if let Some(client) = self.clients.get_mut(&id) {
            client.stage = Stage::Failed;
        }
    }

    /// Takes everything in the regions away from everybody.
    pub(super) fn clear(&mut self, touched: impl Fn(Region) -> bool) {
        let dead: Vec<u64> =
            self.pieces.iter().filter(|(_, piece)| touched(piece.region)).map(|(id, _)| *id).collect();
        for id in dead {
            self.change(id, |piece| {
                piece.holders.clear();
                piece.descriptors = 0;
            });
        }
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            let Some(client) = self.clients.get(&id) else { continue };
            let gone = client.holdings.iter().filter(|(_, holding)| match &holding.what {
                Held::Context(context) => touched(context.region),
                Held::Piece(piece) => !self.pieces.contains_key(piece),
            });
            let gone: Vec<u64> = gone.map(|(id, _)| *id).collect();
            for holding in gone {
                self.drop_holding(id, holding);
            }
        }
    }

    /// Whether anybody holds anything, or a descriptor keeps anything, in the regions.
    pub(super) fn any(&self, touched: impl Fn(Region) -> bool) -> bool {
        self.pieces.values().any(|piece| touched(piece.region))
            || self.clients.values().any(|client| client.contexts().any(&touched))
    }

    /// Bytes on the device.
    pub(super) fn used(&self, region: Region) -> u64 {
        let regions = self.used.iter().filter(|(other, _)| region.covers(**other));
        regions.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// Whether any process has the device open.
    pub(super) fn is_open(&self, device: u32) -> bool {
        self.clients.values().any(|client| client.open.contains(&device))
    }

    /// Bytes of a device that processes in a cgroup, or below it, made.
    pub(super) fn made_below(&self, device: u32, path: &str) -> u64 {
        let from = (device, Arc::from(""));
        let inside = self.made_by.range(from..).take_while(|((other, _), _)| *other == device);
        let inside = inside.filter(|((_, cgroup), _)| super::limits::is_below(cgroup, path));
        inside.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// Pieces of managed memory in a region.
    pub(super) fn managed(&self, region: Region) -> impl Iterator<Item = (u64, &Piece)> {
        let pieces = self.managed.iter().filter_map(|id| Some((*id, self.pieces.get(id)?)));
        pieces.filter(move |(_, piece)| region.covers(piece.region))
    }

    /// Each process on a list, and what it is charged for where it has a context.
    pub(super) fn charges(&self, region: Region, list: ProcessList) -> Vec<(&Identity, Region, u64)> {
        let mut by_place: BTreeMap<(ClientId, Region), u64> = BTreeMap::new();
        for (id, client) in self.clients.iter().filter(|(_, client)| client.lists.contains(&list)) {
            for (place, sums) in client.sums.iter().filter(|(place, _)| region.covers(**place)) {
                if sums.contexts > 0 {
                    by_place.insert((*id, *place), sums.context_bytes + sums.own);
                }
            }
        }
        for piece in self.shared.iter().filter_map(|id| self.pieces.get(id)) {
            let entry = self.charged(piece).and_then(|client| by_place.get_mut(&(client, piece.region)));
            if let Some(bytes) = entry {
                *bytes += piece.resident;
            }
        }
        let entries = by_place.into_iter();
        entries
            .filter_map(|((id, place), bytes)| Some((&self.clients.get(&id)?.identity, place, bytes)))
            .collect()
    }

    /// What everybody holds, by PID and region: memory that several hold is under the first.
    pub(super) fn summaries(&self) -> BTreeMap<(u32, Region), Summary> {
        let mut summaries: BTreeMap<(u32, Region), Summary> = BTreeMap::new();
        for client in self.clients.values() {
            for holding in client.holdings.values() {
                if let Held::Context(context) = &holding.what {
                    let summary = summaries.entry((client.identity.pid, context.region)).or_default();
                    summary.contexts += 1;
                    summary.charged += context.size;
                    summary.uncharged += context.overhead;
                }
            }
        }
        for piece in self.pieces.values() {
            let charged = self.charged(piece);
            let holder = charged.or(piece.holders.first().copied()).and_then(|id| self.clients.get(&id));
            if let Some(holder) = holder {
                let summary = summaries.entry((holder.identity.pid, piece.region)).or_default();
                *(if charged.is_some() { &mut summary.charged } else { &mut summary.uncharged }) +=
                    piece.resident;
            }
        }
        summaries
    }

    /// Pieces that descriptors alone keep: how many, and their bytes.
    pub(super) fn kept(&self) -> BTreeMap<Region, (u64, u64)> {
        let mut kept: BTreeMap<Region, (u64, u64)> = BTreeMap::new();
        for piece in self.pieces.values().filter(|piece| piece.holders.is_empty()) {
            let (count, bytes) = kept.entry(piece.region).or_default();
            *count += 1;
            *bytes += piece.resident;
        }
        kept
    }

    /// The process whose numbers show a piece. Memory made without a context begins to show when
    /// its holder has one; of several holders the first with a context is charged.
    fn charged(&self, piece: &Piece) -> Option<ClientId> {
        if piece.uncharged || piece.kind == MemoryKind::Managed {
            return None;
        }
        let has_context =
            |id: &&ClientId| self.clients.get(*id).is_some_and(|client| client.has_context(piece.region));
        piece.holders.iter().find(has_context).copied()
    }

    /// Changes a piece, and the sums with it; one that nothing holds any more is gone.
    fn change<T>(&mut self, id: u64, change: impl FnOnce(&mut Piece) -> T) -> Option<T> {
        let mut piece = self.pieces.remove(&id)?;
        self.count(id, &piece, false);
        let result = change(&mut piece);
        if piece.is_alive() {
            self.count(id, &piece, true);
            self.pieces.insert(id, piece);
        }
        Some(result)
    }

    fn drop_holding(&mut self, client: ClientId, holding: u64) {
        let Some(holding) = self.clients.get_mut(&client).and_then(|client| client.holdings.remove(&holding))
        else {
            return;
        };
        match holding.what {
            Held::Context(context) => self.count_context(client, &context, false),
            Held::Piece(piece) => {
                self.change(piece, |piece| {
                    if let Some(at) = piece.holders.iter().position(|holder| *holder == client) {
                        piece.holders.remove(at);
                    }
                });
            }
        }
    }

    /// Adds a piece to the sums, or takes it out of them.
    fn count(&mut self, id: u64, piece: &Piece, add: bool) {
        shift(&mut self.used, piece.region, piece.resident, add);
        if piece.kind == MemoryKind::Managed {
            if add {
                self.managed.insert(id)
            } else {
                self.managed.remove(&id)
            };
            return;
        }
        shift(&mut self.made_by, (piece.region.device, piece.cgroup.clone()), piece.resident, add);
        match piece.owner() {
            Some(owner) => {
                if let Some(client) = self.clients.get_mut(&owner) {
                    let sums = client.sums.entry(piece.region).or_default();
                    sums.own = moved(sums.own, piece.resident, add);
                }
            }
            // Nobody will ever be charged: no need to look at it again.
            None if piece.uncharged => {}
            None => {
                if add {
                    self.shared.insert(id)
                } else {
                    self.shared.remove(&id)
                };
            }
        }
    }

    fn count_context(&mut self, client: ClientId, context: &Context, add: bool) {
        shift(&mut self.used, context.region, context.size + context.overhead, add);
        shift(&mut self.made_by, (context.region.device, context.cgroup.clone()), context.size, add);
        if let Some(client) = self.clients.get_mut(&client) {
            let sums = client.sums.entry(context.region).or_default();
            sums.contexts = if add { sums.contexts + 1 } else { sums.contexts.saturating_sub(1) };
            sums.context_bytes = moved(sums.context_bytes, context.size, add);
        }
    }
}

impl Image {
    /// Bytes on each device that it came from.
    fn needed(&self) -> BTreeMap<Region, u64> {
        let mut needed = BTreeMap::new();
        for (_, context) in &self.contexts {
            *needed.entry(context.region).or_default() += context.size + context.overhead;
        }
        for (.., piece) in &self.pieces {
            *needed.entry(piece.region).or_default() += piece.resident;
        }
        needed
    }
}

impl Client {
    fn has_context(&self, region: Region) -> bool {
        self.sums.get(&region).is_some_and(|sums| sums.contexts > 0)
    }

    /// The regions in which it has contexts.
    fn contexts(&self) -> impl Iterator<Item = Region> {
        self.sums.iter().filter(|(_, sums)| sums.contexts > 0).map(|(region, _)| *region)
    }
}

fn moved(sum: u64, bytes: u64, add: bool) -> u64 {
    if add { sum.saturating_add(bytes) } else { sum.saturating_sub(bytes) }
}

fn shift<K: Ord>(sums: &mut BTreeMap<K, u64>, key: K, bytes: u64, add: bool) {
    match sums.entry(key) {
        Entry::Occupied(mut sum) => {
            let now = moved(*sum.get(), bytes, add);
            if now == 0 {
                sum.remove();
            } else {
                sum.insert(now);
            }
        }
        Entry::Vacant(sum) if add && bytes > 0 => {
            sum.insert(bytes);
        }
        Entry::Vacant(_) => {}
    }
}
