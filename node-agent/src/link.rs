//! The line to the keeper: a task that keeps it, and a task for each request.
//!
//! The keeper may be away, be replaced, or crash: the line is made again, and the loop is told what the
//! keeper holds then. A request that got lost is answered as failed; whoever asked asks again.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender},
    time::{Instant, interval_at, sleep, sleep_until},
};
use tracing::{debug, info, warn};

use crate::{
    guard::Pages,
    keeper_protocol::{Keeper, KeeperError, Moved, ParkAsk, Reason, Released, Reserved, Status},
};

/// How long to wait before the keeper is tried again.
const AGAIN: Duration = Duration::from_millis(250);
/// For so long a keeper that left is expected to have a successor, and is not called away.
const HAND_OVER: Duration = Duration::from_secs(2);
/// How often it is asked what it holds, whatever was heard of it.
const REFRESH: Duration = Duration::from_secs(15);
/// What the keys of pages begin with; the pod's UID follows.
const PAGES: &str = "guard/";

/// What is asked of the keeper.
#[derive(Debug)]
pub(crate) enum Order {
    /// Holds up to so many bytes more of a device, and leaves so many free.
    Reserve {
        /// UUID of the device.
        device: Arc<str>,
        /// How many more.
        bytes: u64,
        /// How many stay free.
        keep_free: u64,
    },
    /// Gets ready to hold more of a device.
    Warm {
        /// UUID of the device.
        device: Arc<str>,
    },
    /// Gives back at least so many bytes of a device.
    Release {
        /// UUID of the device.
        device: Arc<str>,
        /// How many.
        bytes: u64,
    },
    /// Moves the memory of a pod's processes to the host.
    Park(ParkAsk),
    /// Moves it back.
    Restore {
        /// UID of the pod.
        pod: String,
        /// UUID of the device.
        device: String,
    },
    /// Lets go of the devices, or no longer.
    StandDown(bool),
    /// Keeps a pod's pages for a later agent.
    Store {
        /// UID of the pod.
        pod: Arc<str>,
        /// Its pages.
        pages: Arc<Pages>,
    },
    /// Gives back what an earlier agent stored.
    Fetch {
        /// UID of the pod.
        pod: Arc<str>,
    },
    /// Forgets the pages of every pod that is not among these.
    Sweep {
        /// UIDs of the pods that there are.
        pods: Vec<Arc<str>>,
    },
}

/// What is heard of the keeper.
#[derive(Debug)]
pub(crate) enum Heard {
    /// It answers, and holds this.
    Up(Status),
    /// It does not answer: why.
    Away(String),
    /// What a reservation came to.
    Reserved {
        /// UUID of the device.
        device: Arc<str>,
        /// The outcome; an error in words.
        result: Result<Reserved, String>,
    },
    /// What a release came to.
    Released {
        /// UUID of the device.
        device: Arc<str>,
        /// The outcome; an error in words.
        result: Result<Released, String>,
    },
    /// What parking a pod, or restoring it, came to. What the keeper holds then follows.
    Moved {
        /// UID of the pod.
        pod: String,
        /// UUID of the device.
        device: String,
        /// The outcome; an error in words.
        result: Result<Moved, String>,
    },
    /// What an earlier agent had stored for a pod.
    Fetched {
        /// UID of the pod.
        pod: Arc<str>,
        /// As [`Pages::kept`] gives it; empty if there is nothing.
        kept: Vec<std::os::fd::OwnedFd>,
    },
}

/// Keeps the line until nobody gives orders any more.
pub(crate) async fn run(
    socket: PathBuf,
    mut orders: UnboundedReceiver<Order>,
    heard: UnboundedSender<Heard>,
) {
    let mut away = false;
    let mut lost = None;
    // Until it is said, it stays as it is.
    let mut stand_down = None;
    loop {
        match open(&socket, stand_down).await {
            Ok((keeper, status)) => {
                info!(keeper = status.version, "the keeper answers");
                away = false;
                if is_busy(&status) {
                    // With what an earlier agent asked for: what it holds is known when that is over.
                    let (keeper, heard) = (keeper.clone(), heard.clone());
                    tokio::spawn(async move { tell_status_until_calm(&keeper, &heard).await });
                }
                // The loop ended: so will this.
                let _ = heard.send(Heard::Up(status));
                if !serve(&keeper, &mut orders, &heard, &mut stand_down).await {
                    return;
                }
                lost = Some(Instant::now());
            }
            Err(error) => {
                let expected = lost.is_some_and(|at: Instant| at.elapsed() < HAND_OVER);
                if !expected && !std::mem::replace(&mut away, true) {
                    warn!(%error, socket = %socket.display(), "the keeper does not answer: nothing can be held back or given out");
                    let _ = heard.send(Heard::Away(error.to_string()));
                }
                // What is asked meanwhile fails.
                let until = Instant::now() + AGAIN;
                loop {
                    tokio::select! {
                        () = sleep_until(until) => break,
                        order = orders.recv() => match order {
                            Some(order) => fail(order, &heard, &mut stand_down),
                            None => return,
                        },
                    }
                }
            }
        }
    }
}

async fn open(socket: &std::path::Path, stand_down: Option<bool>) -> Result<(Keeper, Status), KeeperError> {
    let keeper = Keeper::connect(socket).await?;
    let status = keeper.status().await?;
    // It outlives a hand-over, but not a crash of the keeper.
    if let Some(on) = stand_down.filter(|on| *on != status.stand_down) {
        keeper.stand_down(on).await?;
        return Ok((keeper.clone(), keeper.status().await?));
    }
    Ok((keeper, status))
}

/// Carries out orders until the line is gone. False if nobody gives any more.
async fn serve(
    keeper: &Keeper,
    orders: &mut UnboundedReceiver<Order>,
    heard: &UnboundedSender<Heard>,
    stand_down: &mut Option<bool>,
) -> bool {
    let mut refresh = interval_at(Instant::now() + REFRESH, REFRESH);
    loop {
        tokio::select! {
            biased;
            () = keeper.closed() => return true,
            order = orders.recv() => {
                let Some(order) = order else { return false };
                if let Order::StandDown(on) = &order {
                    *stand_down = Some(*on);
                }
                let (keeper, heard) = (keeper.clone(), heard.clone());
                tokio::spawn(async move { obey(&keeper, order, &heard).await });
            }
            _ = refresh.tick() => {
                let (keeper, heard) = (keeper.clone(), heard.clone());
                tokio::spawn(async move { tell_status(&keeper, &heard).await });
            }
        }
    }
}

async fn tell_status(keeper: &Keeper, heard: &UnboundedSender<Heard>) {
    if let Ok(status) = keeper.status().await {
        let _ = heard.send(Heard::Up(status));
    }
}

async fn tell_status_until_calm(keeper: &Keeper, heard: &UnboundedSender<Heard>) {
    let mut busy = true;
    while busy {
        sleep(AGAIN).await;
        let Ok(status) = keeper.status().await else { return };
        busy = is_busy(&status);
        if heard.send(Heard::Up(status)).is_err() {
            return;
        }
    }
}

/// Whether what the keeper holds is about to change.
fn is_busy(status: &Status) -> bool {
    status.devices.iter().any(|device| device.busy)
}

async fn obey(keeper: &Keeper, order: Order, heard: &UnboundedSender<Heard>) {
    let changed = match order {
        Order::Reserve { device, bytes, keep_free } => {
            let result = keeper.reserve(&device, bytes, keep_free).await.map_err(|error| error.to_string());
            let failed = result.is_err();
            let _ = heard.send(Heard::Reserved { device, result });
            failed
        }
        Order::Release { device, bytes } => {
            let result = keeper.release(&device, bytes, None).await.map_err(|error| error.to_string());
            let failed = result.is_err();
            let _ = heard.send(Heard::Released { device, result });
            failed
        }
        Order::Park(what) => {
            let (pod, device) = (what.pod.clone(), what.device.clone());
            let result = keeper.park(what).await.map_err(|error| error.to_string());
            let _ = heard.send(Heard::Moved { pod, device, result });
            // What is parked is told by nothing else.
            true
        }
        Order::Restore { pod, device } => {
            let result = keeper.restore(&pod, &device).await.map_err(|error| error.to_string());
            let _ = heard.send(Heard::Moved { pod, device, result });
            true
        }
        Order::Warm { device } => {
            if let Err(error) = keeper.warm(&device).await {
                debug!(%device, %error, "the keeper could not get ready");
            }
            false
        }
        Order::StandDown(on) => {
            match keeper.stand_down(on).await {
                Ok(()) => info!(on, "the keeper stands down, or no longer"),
                Err(error) => warn!(on, %error, "the keeper did not stand down, or not up again"),
            }
            true
        }
        Order::Store { pod, pages } => {
            if let Err(error) = keeper.put(&key(&pod), &pages.kept()).await {
                warn!(%pod, %error, "the pages of a guarded pod are not kept for a later agent");
            }
            false
        }
        Order::Fetch { pod } => {
            let _ = heard.send(fetch(keeper, pod).await);
            false
        }
        Order::Sweep { pods } => {
            if let Err(error) = sweep(keeper, &pods).await {
                debug!(%error, "the pages of pods that are gone are kept on");
            }
            false
        }
    };
    if changed {
        // What it holds may be anything now.
        tell_status(keeper, heard).await;
    }
}

async fn fetch(keeper: &Keeper, pod: Arc<str>) -> Heard {
    for _ in 0..3 {
        match keeper.get(&key(&pod)).await {
            Ok(kept) => return Heard::Fetched { pod, kept },
            Err(error) if error.reason() == Some(Reason::NotFound) => break,
            Err(error) => {
                debug!(%pod, %error, "the keeper did not give back the pages of a pod");
                sleep(AGAIN).await;
            }
        }
    }
    Heard::Fetched { pod, kept: Vec::new() }
}

async fn sweep(keeper: &Keeper, pods: &[Arc<str>]) -> Result<(), KeeperError> {
    for key in keeper.keys().await? {
        let gone = key.strip_prefix(PAGES).is_some_and(|uid| pods.iter().all(|pod| **pod != *uid));
        if gone {
            keeper.forget(&key).await?;
        }
    }
    Ok(())
}

/// What is heard of an order while the keeper is away.
fn fail(order: Order, heard: &UnboundedSender<Heard>, stand_down: &mut Option<bool>) {
    let why = || "the keeper does not answer".to_owned();
    let answer = match order {
        Order::Reserve { device, .. } => Heard::Reserved { device, result: Err(why()) },
        Order::Release { device, .. } => Heard::Released { device, result: Err(why()) },
        Order::Park(ParkAsk { pod, device, .. }) | Order::Restore { pod, device } => {
            Heard::Moved { pod, device, result: Err(why()) }
        }
        Order::Fetch { pod } => Heard::Fetched { pod, kept: Vec::new() },
        Order::StandDown(on) => {
            // Said again as soon as it answers.
            *stand_down = Some(on);
            return;
        }
        // Stored when it answers again; the rest can wait.
        Order::Store { .. } | Order::Warm { .. } | Order::Sweep { .. } => return,
    };
    let _ = heard.send(answer);
}

fn key(pod: &str) -> String {
    format!("{PAGES}{pod}")
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        os::fd::{AsFd, OwnedFd},
        path::Path,
    };

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    };
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

    use super::*;
    use crate::keeper_protocol::{Answer, Ask, DeviceStatus, End, Outcome, Refusal, Reply, Request, Socket};

    const DEVICE: &str = "GPU-00000000-0000-0000-0000-000000000001";

    /// A keeper that holds numbers.
    #[derive(Default)]
    struct Fake {
        ballast: u64,
        stand_down: bool,
        stored: HashMap<String, Vec<OwnedFd>>,
    }

    impl Fake {
        fn answer(&mut self, ask: Ask, descriptors: Vec<OwnedFd>) -> (Outcome, Vec<OwnedFd>) {
            let answer = match ask {
                Ask::Status {} => Answer::Status(Status {
                    stand_down: self.stand_down,
                    devices: vec![DeviceStatus {
                        uuid: DEVICE.into(),
                        ballast_bytes: self.ballast,
                        ..DeviceStatus::default()
                    }],
                    ..Status::default()
                }),
                Ask::Reserve { bytes, .. } => {
                    self.ballast += bytes;
                    let (end, ballast_bytes) = (End::Complete, self.ballast);
                    Answer::Reserved(Reserved { bytes, ballast_bytes, end, message: None, free_bytes: None })
                }
                Ask::Release { bytes, .. } => {
                    let bytes = bytes.min(self.ballast);
                    self.ballast -= bytes;
                    Answer::Released(Released { bytes, ballast_bytes: self.ballast })
                }
                Ask::StandDown { on } => {
                    self.stand_down = on;
                    Answer::Done {}
                }
                Ask::Put { key } => {
                    self.stored.insert(key, descriptors);
                    Answer::Done {}
                }
                Ask::Get { key } => match self.stored.get(&key) {
                    Some(stored) => {
                        let copies = stored.iter().map(|fd| fd.try_clone().unwrap()).collect();
                        return (Outcome::Ok(Answer::Done {}), copies);
                    }
                    None => return (Outcome::Error(Refusal::new(Reason::NotFound, "none")), Vec::new()),
                },
                Ask::Drop { key } => {
                    self.stored.remove(&key);
                    Answer::Done {}
                }
                Ask::Keys { after } => {
                    let mut keys: Vec<_> = self.stored.keys().cloned().collect();
                    keys.sort();
                    keys.retain(|key| after.as_ref().is_none_or(|after| key > after));
                    Answer::Keys { keys }
                }
                _ => Answer::Done {},
            };
            (Outcome::Ok(answer), Vec::new())
        }
    }

    fn listener(path: &Path) -> OwnedFd {
        let _ = std::fs::remove_file(path);
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&socket, 8).unwrap();
        socket
    }

    /// Serves one connection until it ends, or until so many requests were answered.
    async fn serve_one(listener: OwnedFd, fake: &mut Fake, most: usize) {
        let accepted = tokio::task::spawn_blocking(move || accept_with(&listener, SocketFlags::CLOEXEC));
        let socket = Socket::new(accepted.await.unwrap().unwrap()).unwrap();
        for _ in 0..most {
            let Ok(frame) = socket.receive().await else { return };
            let Request { id, ask } = frame.read().unwrap();
            let (result, descriptors) = fake.answer(ask, frame.descriptors);
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            socket.send(&Reply { id, result }, &descriptors).await.unwrap();
        }
    }

    fn begin(socket: &Path) -> (UnboundedSender<Order>, UnboundedReceiver<Heard>) {
        let (orders, received) = unbounded_channel();
        let (send, heard) = unbounded_channel();
        tokio::spawn(run(socket.to_owned(), received, send));
        (orders, heard)
    }

    async fn next(heard: &mut UnboundedReceiver<Heard>) -> Heard {
        tokio::time::timeout(Duration::from_secs(20), heard.recv()).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn orders_are_carried_out_and_pages_are_kept_for_a_later_agent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper.sock");
        let listening = listener(&path);
        let keeper = tokio::spawn(async move {
            let mut fake = Fake::default();
            serve_one(listening, &mut fake, usize::MAX).await;
            fake
        });
        let (orders, mut heard) = begin(&path);
        assert!(matches!(next(&mut heard).await, Heard::Up(status) if status.devices[0].ballast_bytes == 0));
        orders.send(Order::Reserve { device: DEVICE.into(), bytes: 7, keep_free: 1 }).unwrap();
        let Heard::Reserved { result, .. } = next(&mut heard).await else { panic!() };
        assert_eq!(result.unwrap().ballast_bytes, 7);
        orders.send(Order::Release { device: DEVICE.into(), bytes: 3 }).unwrap();
        let Heard::Released { result, .. } = next(&mut heard).await else { panic!() };
        assert_eq!(result.unwrap(), Released { bytes: 3, ballast_bytes: 4 });
        let pages = Arc::new(Pages::create().unwrap());
        pages.usage.raise_epoch();
        for pod in ["a", "gone"] {
            orders.send(Order::Store { pod: pod.into(), pages: Arc::clone(&pages) }).unwrap();
        }
        // Each order is a task of its own: nothing says in which order they are done.
        let fetched =
            async |orders: &UnboundedSender<Order>, heard: &mut UnboundedReceiver<Heard>, pod: &str| {
                orders.send(Order::Fetch { pod: pod.into() }).unwrap();
                let Heard::Fetched { kept, .. } = next(heard).await else { panic!() };
                kept.into_iter().next()
            };
        let usage = loop {
            if let Some(usage) = fetched(&orders, &mut heard, "a").await {
                break usage;
            }
        };
        assert_eq!(Pages::resume(usage).unwrap().usage.epoch(), pages.usage.epoch());
        orders.send(Order::Sweep { pods: vec!["a".into()] }).unwrap();
        while fetched(&orders, &mut heard, "gone").await.is_some() {}
        assert!(fetched(&orders, &mut heard, "a").await.is_some());
        drop(orders);
        assert_eq!(keeper.await.unwrap().stored.len(), 1);
    }

    #[tokio::test]
    async fn a_keeper_that_hands_over_is_not_away_and_is_told_again_to_stand_down() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper.sock");
        let listening = listener(&path);
        let again = path.clone();
        let keeper = tokio::spawn(async move {
            let mut first = Fake { ballast: 5, ..Fake::default() };
            // Hello, status, standing down and the status after it.
            serve_one(listening, &mut first, 4).await;
            assert!(first.stand_down);
            // A new keeper that knows nothing of it, as after a crash.
            let listening = listener(&again);
            let mut second = Fake::default();
            serve_one(listening, &mut second, usize::MAX).await;
            second
        });
        let (orders, mut heard) = begin(&path);
        assert!(matches!(next(&mut heard).await, Heard::Up(status) if status.devices[0].ballast_bytes == 5));
        orders.send(Order::StandDown(true)).unwrap();
        assert!(matches!(next(&mut heard).await, Heard::Up(status) if status.stand_down));
        let Heard::Up(status) = next(&mut heard).await else { panic!("it is not away") };
        assert_eq!((status.stand_down, status.devices[0].ballast_bytes), (true, 0));
        drop(orders);
        assert!(keeper.await.unwrap().stand_down);
    }

    #[tokio::test]
    async fn a_keeper_that_is_away_is_told_once_and_what_is_asked_of_it_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper.sock");
        let (orders, mut heard) = begin(&path);
        assert!(matches!(next(&mut heard).await, Heard::Away(_)));
        orders.send(Order::Reserve { device: DEVICE.into(), bytes: 7, keep_free: 1 }).unwrap();
        assert!(matches!(next(&mut heard).await, Heard::Reserved { result: Err(_), .. }));
        orders.send(Order::Fetch { pod: "a".into() }).unwrap();
        assert!(matches!(next(&mut heard).await, Heard::Fetched { kept, .. } if kept.is_empty()));
        orders.send(Order::StandDown(true)).unwrap();
        let listening = listener(&path);
        let keeper = tokio::spawn(async move {
            let mut fake = Fake::default();
            serve_one(listening, &mut fake, usize::MAX).await;
            fake
        });
        assert!(matches!(next(&mut heard).await, Heard::Up(status) if status.stand_down));
        drop(orders);
        assert!(keeper.await.unwrap().stand_down);
    }
}
