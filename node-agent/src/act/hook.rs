//! `Hook`: asks the engine in a pod, by an endpoint of its own, to free what it caches.
//!
//! A call goes to the pod's own address and to nowhere else: no name is looked up, no redirect is
//! followed, no proxy is asked. It ends at its time limit, and reads no more than the head of the answer.
//! Calls run beside the loop, a few at a time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{Semaphore, mpsc::UnboundedReceiver, mpsc::UnboundedSender},
    time::timeout,
};

/// Calls at a time.
const AT_ONCE: usize = 4;
/// The most that is read of an answer, in bytes.
const MOST: usize = 64 << 10;

/// A call to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// UID of the pod, as the kubelet knows it.
    pub(crate) pod: Arc<str>,
    /// UUID of the device whose memory is to be freed.
    pub(crate) device: Arc<str>,
    /// The pod's own address.
    pub(crate) address: IpAddr,
    /// The port in the pod.
    pub(crate) port: u16,
    /// The path, with what follows a question mark.
    pub(crate) path: String,
    /// How long it may take.
    pub(crate) limit: Duration,
    /// It takes back what an earlier call did.
    pub(crate) undo: bool,
}

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    /// The call.
    pub(crate) call: Call,
    /// Whether the engine said that it did so; else why not.
    pub(crate) result: Result<(), Failure>,
}

/// Why a call came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// Nobody listens there, or the connection broke.
    #[error("the connection failed: {0}")]
    Connection(String),
    /// It took too long.
    #[error("there was no answer within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// It was answered by a redirect, which is not followed.
    #[error("it answered {0}, a redirect, which is not followed")]
    Redirect(u16),
    /// It was answered by something else than success.
    #[error("it answered {0}")]
    Status(u16),
    /// What it answered is not HTTP, or its head does not end.
    #[error("what it answered is not HTTP/1.1, or its head is longer than 64 KiB")]
    Malformed,
}

impl Failure {
    /// The reason for metrics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Connection(_) => "connection",
            Self::TimedOut(_) => "timeout",
            Self::Redirect(_) => "redirect",
            Self::Status(_) => "status",
            Self::Malformed => "malformed",
        }
    }
}

/// Makes calls until nobody asks for any more.
pub(crate) async fn run(mut calls: UnboundedReceiver<Call>, answered: UnboundedSender<Answered>) {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    while let Some(call) = calls.recv().await {
        let (room, answered) = (Arc::clone(&room), answered.clone());
        tokio::spawn(async move {
            // It is never closed.
            let Ok(_turn) = room.acquire().await else { return };
            let result = make(&call).await;
            // The loop ended: nobody asks what became of it.
            let _ = answered.send(Answered { call, result });
        });
    }
}

/// Makes one call.
pub(crate) async fn make(call: &Call) -> Result<(), Failure> {
    match timeout(call.limit, exchange(call)).await {
        Ok(Ok(200..=299)) => Ok(()),
        Ok(Ok(status @ 300..=399)) => Err(Failure::Redirect(status)),
        Ok(Ok(status)) => Err(Failure::Status(status)),
        Ok(Err(failure)) => Err(failure),
        Err(_) => Err(Failure::TimedOut(call.limit)),
    }
}

/// Sends the request, and returns the status once the head of the answer is there.
async fn exchange(call: &Call) -> Result<u16, Failure> {
    let broken = |error: std::io::Error| Failure::Connection(error.to_string());
    let to = SocketAddr::new(call.address, call.port);
    let mut stream = TcpStream::connect(to).await.map_err(broken)?;
    let request = format!(
        "POST {} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: highwater-agent\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        call.path
    );
    stream.write_all(request.as_bytes()).await.map_err(broken)?;
    let mut head = Vec::new();
    let mut part = [0; 4096];
    loop {
        let count = stream.read(&mut part).await.map_err(broken)?;
        let Some(read) = part.get(..count).filter(|read| !read.is_empty()) else {
            return Err(Failure::Malformed);
        };
        head.extend_from_slice(read);
        match status(&head) {
            // Nothing that comes first is the answer: `100 Continue` and the like.
            Head::Whole { status: 100..=199, end } => drop(head.drain(..end)),
            Head::Whole { status, .. } => return Ok(status),
            Head::Malformed => return Err(Failure::Malformed),
            Head::Partial if head.len() >= MOST => return Err(Failure::Malformed),
            Head::Partial => {}
        }
    }
}

/// What was read so far.
#[derive(Debug, PartialEq, Eq)]
enum Head {
    /// All of the head.
    Whole { status: u16, end: usize },
    /// A part of it.
    Partial,
    /// No HTTP/1.x.
    Malformed,
}

/// Reads the head of an answer (RFC 9112, section 4).
fn status(bytes: &[u8]) -> Head {
    const BEGIN: &[u8] = b"HTTP/1.";
    let begun = bytes.get(..BEGIN.len().min(bytes.len())).unwrap_or_default();
    if !BEGIN.starts_with(begun) {
        return Head::Malformed;
    }
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return Head::Partial };
    let digits = bytes.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok());
    let status =
        digits.filter(|digits| digits.bytes().all(|c| c.is_ascii_digit())).and_then(|d| d.parse().ok());
    match (bytes.get(8), status) {
        (Some(b' '), Some(status)) => Head::Whole { status, end: end + 4 },
        _ => Head::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{net::TcpListener, sync::mpsc::unbounded_channel, task::JoinHandle};

    use super::*;

    fn call(port: u16) -> Call {
        Call {
            pod: "a".into(),
            device: "GPU-0".into(),
            address: Ipv4Addr::LOCALHOST.into(),
            port,
            path: "/sleep?level=1".into(),
            limit: Duration::from_millis(300),
            undo: false,
        }
    }

    /// Serves one connection: reads the request, sends `answer`, and goes on as `then` says.
    async fn serve(answer: &'static [u8], then: Then) -> (u16, JoinHandle<String>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let count = stream.read(&mut request).await.unwrap();
            request.truncate(count);
            let _ = stream.write_all(answer).await;
            match then {
                Then::Close => {}
                Then::Stream => while stream.write_all(&[b'x'; 4096]).await.is_ok() {},
                Then::Hang => drop(stream.read(&mut [0; 1]).await),
            }
            String::from_utf8(request).unwrap()
        });
        (port, served)
    }

    enum Then {
        Close,
        Stream,
        Hang,
    }

    #[tokio::test]
    async fn an_engine_is_asked_and_its_yes_is_heard() {
        let (port, served) = serve(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Then::Close).await;
        assert_eq!(make(&call(port)).await, Ok(()));
        let request = served.await.unwrap();
        assert!(request.starts_with("POST /sleep?level=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains(&format!("\r\nHost: 127.0.0.1:{port}\r\n")), "{request}");
    }

    #[tokio::test]
    async fn a_redirect_is_not_followed() {
        let (elsewhere, other) = serve(b"HTTP/1.1 200 OK\r\n\r\n", Then::Close).await;
        let answer =
            format!("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:{elsewhere}/\r\n\r\n");
        let (port, _) = serve(answer.leak().as_bytes(), Then::Close).await;
        assert_eq!(make(&call(port)).await, Err(Failure::Redirect(307)));
        assert!(!other.is_finished(), "nobody came there");
    }

    #[tokio::test]
    async fn one_that_answers_an_error_nothing_or_something_else_is_a_failure() {
        for (answer, then, expected) in [
            (&b"HTTP/1.1 500 Internal Server Error\r\n\r\n"[..], Then::Close, Failure::Status(500)),
            (b"", Then::Close, Failure::Malformed),
            (b"SSH-2.0-OpenSSH_9.2\r\n", Then::Hang, Failure::Malformed),
            (b"HTTP/1.1 abc\r\n\r\n", Then::Close, Failure::Malformed),
            (b"HTTP/1.1 200 OK\r\nX: ", Then::Stream, Failure::Malformed),
            (b"HTTP/1.1 20", Then::Hang, Failure::TimedOut(Duration::from_millis(300))),
            (b"", Then::Hang, Failure::TimedOut(Duration::from_millis(300))),
        ] {
            let (port, _) = serve(answer, then).await;
            assert_eq!(make(&call(port)).await, Err(expected), "{answer:?}");
        }
        let (port, served) = serve(b"", Then::Close).await;
        let _ = make(&call(port)).await;
        served.await.unwrap();
        assert!(matches!(make(&call(port)).await, Err(Failure::Connection(_))), "nobody listens");
    }

    #[tokio::test]
    async fn a_body_that_does_not_end_is_not_waited_for() {
        let (port, _) = serve(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", Then::Stream).await;
        assert_eq!(make(&call(port)).await, Ok(()));
    }

    #[tokio::test]
    async fn endpoints_that_hang_take_no_more_turns_than_there_are() {
        let (calls, made) = unbounded_channel();
        let (answered, mut answers) = unbounded_channel();
        let running = tokio::spawn(run(made, answered));
        let mut hanging = Vec::new();
        for _ in 0..AT_ONCE * 2 {
            let (port, served) = serve(b"", Then::Hang).await;
            calls.send(call(port)).unwrap();
            hanging.push(served);
        }
        let (port, _) = serve(b"HTTP/1.1 204 No Content\r\n\r\n", Then::Close).await;
        calls.send(call(port)).unwrap();
        drop(calls);
        let mut results = Vec::new();
        while let Some(Answered { call, result }) = answers.recv().await {
            results.push((call.port == port, result.is_ok()));
        }
        assert_eq!(results.len(), AT_ONCE * 2 + 1);
        assert!(results.iter().all(|(last, ok)| last == ok), "each has its turn");
        running.await.unwrap();
    }
}
