//! `Hook`: asks the engine in a pod, by an endpoint of its own, to free what it caches.
//!
//! A call goes to the pod's own address and reads no more than the head of the answer. Calls run beside the
//! loop, a few at a time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{Semaphore, mpsc::UnboundedReceiver, mpsc::UnboundedSender};

pub(crate) use crate::pod_http::Failure;
use crate::pod_http::{self, Request};

/// Calls at a time.
const AT_ONCE: usize = 4;

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
    let to = SocketAddr::new(call.address, call.port);
    pod_http::tell(Request { method: "POST", to, path: &call.path, limit: call.limit }).await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::pod_http::tests::{Then, serve};

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
