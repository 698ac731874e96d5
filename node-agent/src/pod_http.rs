//! Requests to a pod's own address.
//!
//! They go there and nowhere else: no name is looked up, no redirect is followed, no proxy is asked. Each
//! ends at its time limit, and no more is read than it may take.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The longest head of an answer, in bytes.
const HEAD: usize = 64 << 10;

/// A request to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// `GET` or `POST`.
    pub(crate) method: &'static str,
    /// The pod's own address and the port there.
    pub(crate) to: SocketAddr,
    /// The path, with what follows a question mark.
    pub(crate) path: &'a str,
    /// How long it may take.
    pub(crate) limit: Duration,
}

/// Why a request came to nothing.
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
    /// There is more of it than may be.
    #[error("its answer is longer than {} KiB", .0 >> 10)]
    TooLong(usize),
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
            Self::TooLong(_) => "too_long",
        }
    }
}

/// Makes a request and waits for the head of its answer alone.
pub(crate) async fn tell(request: Request<'_>) -> Result<(), Failure> {
    within(request, None).await.map(|_| ())
}

/// Makes a request and returns the body of its answer, of at most so many bytes.
pub(crate) async fn ask(request: Request<'_>, most: usize) -> Result<Vec<u8>, Failure> {
    within(request, Some(most)).await
}

async fn within(request: Request<'_>, body: Option<usize>) -> Result<Vec<u8>, Failure> {
    match timeout(request.limit, exchange(request, body)).await {
        Ok(result) => result,
        Err(_) => Err(Failure::TimedOut(request.limit)),
    }
}

async fn exchange(request: Request<'_>, body: Option<usize>) -> Result<Vec<u8>, Failure> {
    let Request { method, to, path, .. } = request;
    let mut stream = TcpStream::connect(to).await.map_err(broken)?;
    let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: highwater-agent\r\n{length}Connection: close\r\n\r\n"
    );
    stream.write_all(text.as_bytes()).await.map_err(broken)?;
    let mut read = Vec::new();
    loop {
        if !more(&mut stream, &mut read).await? {
            return Err(Failure::Malformed);
        }
        match head(&read) {
            // Nothing that comes first is the answer: `100 Continue` and the like.
            Head::Whole { status: 100..=199, end } => drop(read.drain(..end)),
            Head::Whole { status: 200..=299, end } => {
                let framing = Framing::of(read.get(..end).unwrap_or_default());
                read.drain(..end);
                return match body {
                    None => Ok(Vec::new()),
                    Some(most) => rest(&mut stream, read, framing?, most).await,
                };
            }
            Head::Whole { status: status @ 300..=399, .. } => return Err(Failure::Redirect(status)),
            Head::Whole { status, .. } => return Err(Failure::Status(status)),
            Head::Malformed => return Err(Failure::Malformed),
            Head::Partial if read.len() >= HEAD => return Err(Failure::Malformed),
            Head::Partial => {}
        }
    }
}

/// Reads what there is more of. Whether there is.
async fn more(stream: &mut TcpStream, to: &mut Vec<u8>) -> Result<bool, Failure> {
    let mut part = [0; 4096];
    let count = stream.read(&mut part).await.map_err(broken)?;
    to.extend_from_slice(part.get(..count).unwrap_or_default());
    Ok(count > 0)
}

#[expect(clippy::needless_pass_by_value, reason = "it is given to map_err")]
fn broken(error: std::io::Error) -> Failure {
    Failure::Connection(error.to_string())
}

/// Reads the rest of a body.
async fn rest(
    stream: &mut TcpStream,
    mut read: Vec<u8>,
    framing: Framing,
    most: usize,
) -> Result<Vec<u8>, Failure> {
    loop {
        if read.len() > most {
            return Err(Failure::TooLong(most));
        }
        let whole = match framing {
            Framing::Length(length) if length > most => return Err(Failure::TooLong(most)),
            Framing::Length(length) => read.len() >= length,
            Framing::Chunked => read.ends_with(b"0\r\n\r\n"),
            Framing::Close => false,
        };
        if whole || !more(stream, &mut read).await? {
            return framing.body(read).ok_or(Failure::Malformed);
        }
    }
}

/// How the end of a body is known (RFC 9112, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
    Close,
}

impl Framing {
    fn of(head: &[u8]) -> Result<Self, Failure> {
        let head = std::str::from_utf8(head).map_err(|_| Failure::Malformed)?;
        let mut framing = Self::Close;
        for (name, value) in head.lines().skip(1).filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            if name.eq_ignore_ascii_case("transfer-encoding") {
                let chunked = value.eq_ignore_ascii_case("chunked");
                return if chunked { Ok(Self::Chunked) } else { Err(Failure::Malformed) };
            }
            if name.eq_ignore_ascii_case("content-length") {
                framing = Self::Length(value.parse().map_err(|_| Failure::Malformed)?);
            }
        }
        Ok(framing)
    }

    /// The body in what was read; `None` where it does not end as it says.
    fn body(self, mut read: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Self::Close => Some(read),
            Self::Length(length) => {
                let whole = read.len() >= length;
                read.truncate(length);
                whole.then_some(read)
            }
            Self::Chunked => dechunked(&read),
        }
    }
}

/// A body without the marks of its chunks.
fn dechunked(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let line = std::str::from_utf8(rest.get(..end)?).ok()?;
        let size = line.split(';').next().unwrap_or("").trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        rest = rest.get(end + 2..)?;
        if size == 0 {
            return Some(body);
        }
        let (chunk, after) = rest.split_at_checked(size)?;
        body.extend_from_slice(chunk);
        rest = after.strip_prefix(b"\r\n")?;
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
fn head(bytes: &[u8]) -> Head {
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
pub(crate) mod tests {
    use std::net::Ipv4Addr;

    use tokio::{net::TcpListener, task::JoinHandle};

    use super::*;

    /// Serves one connection: reads the request, sends `answer`, and goes on as `then` says.
    pub(crate) async fn serve(answer: &'static [u8], then: Then) -> (u16, JoinHandle<String>) {
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

    pub(crate) enum Then {
        Close,
        Stream,
        Hang,
    }

    fn request(method: &'static str, port: u16) -> Request<'static> {
        let to = (Ipv4Addr::LOCALHOST, port).into();
        Request { method, to, path: "/metrics", limit: Duration::from_millis(300) }
    }

    #[tokio::test]
    async fn a_body_is_read_however_its_end_is_told() {
        for answer in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nup 1"[..],
            b"HTTP/1.0 200 OK\r\n\r\nup ",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nup\r\n1;x=y\r\n \r\n0\r\n\r\n",
        ] {
            let (port, served) = serve(answer, Then::Close).await;
            assert_eq!(ask(request("GET", port), 100).await, Ok(b"up ".to_vec()));
            let request = served.await.unwrap();
            assert!(
                request.starts_with("GET /metrics HTTP/1.1\r\n") && !request.contains("Length"),
                "{request}"
            );
        }
    }

    #[tokio::test]
    async fn a_body_that_is_too_long_or_cut_off_is_a_failure() {
        for (answer, then, expected) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n"[..], Then::Hang, Failure::TooLong(100)),
            (b"HTTP/1.1 200 OK\r\n\r\n", Then::Stream, Failure::TooLong(100)),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nup", Then::Close, Failure::Malformed),
            (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", Then::Close, Failure::Malformed),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", Then::Close, Failure::Malformed),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
                Then::Close,
                Failure::Malformed,
            ),
            (
                b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",
                Then::Close,
                Failure::Redirect(302),
            ),
            (b"HTTP/1.1 200 OK\r\n\r\nup", Then::Hang, Failure::TimedOut(Duration::from_millis(300))),
        ] {
            let (port, _) = serve(answer, then).await;
            assert_eq!(ask(request("GET", port), 100).await, Err(expected), "{answer:?}");
        }
    }

    #[tokio::test]
    async fn who_is_told_something_need_not_end_its_answer() {
        let (port, _) = serve(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", Then::Stream).await;
        assert_eq!(tell(request("POST", port)).await, Ok(()));
    }
}
