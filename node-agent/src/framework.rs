//! Reads what the frameworks in pods say of themselves, from the endpoints that the pods name.
//!
//! Beside the loop and a few at a time: a pod that does not answer costs nobody but itself.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use highwater_policy::leak::Numbers;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::sleep,
};

use crate::pod_http::{self, Failure, Request};

/// Readings at a time.
const AT_ONCE: usize = 4;
/// How long one may take at most.
const LIMIT: Duration = Duration::from_secs(2);
/// The longest answer, in bytes.
const MOST: usize = 1 << 20;
/// No pod is asked more often than this.
const SOONEST: Duration = Duration::from_millis(200);

/// An endpoint that is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// UID of the pod, as the kubelet knows it.
    pub(crate) pod: Arc<str>,
    /// The pod's own address.
    pub(crate) address: IpAddr,
    /// The port in the pod.
    pub(crate) port: u16,
    /// The path.
    pub(crate) path: String,
    /// How often, in milliseconds.
    pub(crate) every: u64,
}

/// What came of a reading.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scraped {
    /// The endpoint.
    pub(crate) target: Target,
    /// The numbers; else why there are none.
    pub(crate) result: Result<Numbers, Fault>,
}

/// Why there are no numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    /// There was no answer that could be read.
    #[error(transparent)]
    Http(#[from] Failure),
    /// None of the numbers in the answer is known.
    #[error("none of the numbers in its answer is known")]
    Nothing,
}

impl Fault {
    /// The reason for metrics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Http(failure) => failure.as_str(),
            Self::Nothing => "nothing_known",
        }
    }
}

/// Reads endpoints for as long as somebody wants it.
pub(crate) async fn run(
    mut targets: watch::Receiver<Arc<Vec<Target>>>,
    scraped: mpsc::UnboundedSender<Scraped>,
) {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let (ended_send, mut ended) = mpsc::unbounded_channel();
    let mut asked: HashMap<Arc<str>, Instant> = HashMap::new();
    let mut asking: HashSet<Arc<str>> = HashSet::new();
    loop {
        let wanted = Arc::clone(&targets.borrow_and_update());
        asked.retain(|pod, _| wanted.iter().any(|target| target.pod == *pod));
        let mut next: Option<Duration> = None;
        for target in wanted.iter() {
            if asking.contains(&target.pod) {
                continue;
            }
            let every = Duration::from_millis(target.every).max(SOONEST);
            let left = asked.get(&target.pod).map_or(Duration::ZERO, |at| every.saturating_sub(at.elapsed()));
            if !left.is_zero() {
                next = Some(next.map_or(left, |next| next.min(left)));
                continue;
            }
            asked.insert(Arc::clone(&target.pod), Instant::now());
            asking.insert(Arc::clone(&target.pod));
            let (room, ended_send, target) = (Arc::clone(&room), ended_send.clone(), target.clone());
            tokio::spawn(async move {
                // It is never closed.
                let Ok(_turn) = room.acquire().await else { return };
                let result = read(&target).await;
                // The loop ended: nobody asks.
                let _ = ended_send.send(Scraped { target, result });
            });
        }
        tokio::select! {
            changed = targets.changed() => if changed.is_err() { return },
            Some(done) = ended.recv() => {
                asking.remove(&done.target.pod);
                if scraped.send(done).is_err() {
                    return;
                }
            }
            () = sleep(next.unwrap_or_default()), if next.is_some() => {}
        }
    }
}

/// Reads one.
async fn read(target: &Target) -> Result<Numbers, Fault> {
    let to = SocketAddr::new(target.address, target.port);
    let limit = LIMIT.min(Duration::from_millis(target.every).max(SOONEST));
    let body = pod_http::ask(Request { method: "GET", to, path: &target.path, limit }, MOST).await?;
    let numbers = Numbers::read(&String::from_utf8_lossy(&body));
    if numbers.is_empty() { Err(Fault::Nothing) } else { Ok(numbers) }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::pod_http::tests::{Then, serve};

    fn target(pod: &str, port: u16) -> Target {
        Target {
            pod: pod.into(),
            address: Ipv4Addr::LOCALHOST.into(),
            port,
            path: "/metrics".into(),
            every: 500,
        }
    }

    #[tokio::test]
    async fn an_endpoint_that_hangs_keeps_nobody_else_from_being_read() {
        let (hanging, _) = serve(b"", Then::Hang).await;
        let (silent, _) = serve(b"HTTP/1.1 200 OK\r\n\r\nup 1\n", Then::Close).await;
        let (good, _) = serve(b"HTTP/1.1 200 OK\r\n\r\nhighwater_work_total 5\n", Then::Close).await;
        let wanted = vec![target("hanging", hanging), target("silent", silent), target("good", good)];
        let (_keep, targets) = watch::channel(Arc::new(wanted));
        let (scraped, mut done) = mpsc::unbounded_channel();
        let running = tokio::spawn(run(targets, scraped));
        let mut found = HashMap::new();
        while found.len() < 3 {
            let scraped = done.recv().await.unwrap();
            found.entry(scraped.target.pod.to_string()).or_insert(scraped.result);
        }
        assert_eq!(found["good"].as_ref().unwrap().work, Some(5.0));
        assert_eq!(found["silent"].as_ref().unwrap_err().as_str(), "nothing_known");
        assert_eq!(found["hanging"].as_ref().unwrap_err().as_str(), "timeout");
        running.abort();
    }
}
