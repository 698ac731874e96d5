//! A server of models as its control endpoints show it: by these it gives its caches back. Also the
//! ways in which such an endpoint can be bad.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::errands::{Asker, Wish};
use crate::run::say;

/// How long a client may take for its request, and for taking a part of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest head of a request that is read.
const LONGEST_HEAD: u64 = 8 << 10;
/// What an endless answer consists of.
const CHUNK: &[u8] = b"400\r\n";

/// How it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Manner {
    /// As vLLM, SGLang and Triton do.
    Well,
    /// It takes the request and says nothing.
    Hangs,
    /// It sends the client elsewhere, with its request.
    Redirects(String),
    /// Its answer has no end.
    Streams,
    /// By 500, whatever was asked for.
    Fails,
}

/// What of the cache an endpoint concerns, by method and path as engines have them.
///
/// vLLM: `/reset_prefix_cache`, `/sleep?level=1` and `/wake_up` of its development mode. SGLang:
/// `/flush_cache`. Triton: `/v2/repository/models/MODEL/unload`.
fn route(method: &str, target: &str) -> Result<Wish, u16> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let wish = match path {
        "/reset_prefix_cache" | "/flush_cache" => Wish::Flush,
        "/sleep" if query == "level=1" => Wish::Sleep,
        "/sleep" => return Err(400),
        "/wake_up" => Wish::WakeUp,
        _ => {
            let model =
                path.strip_prefix("/v2/repository/models/").and_then(|rest| rest.strip_suffix("/unload"));
            match model {
                Some(model) if !model.is_empty() && !model.contains('/') => Wish::Flush,
                _ => return Err(404),
            }
        }
    };
    if method == "POST" { Ok(wish) } else { Err(405) }
}

/// Answers at a port of every address until the process ends.
pub(crate) fn serve(port: u16, manner: Manner, asker: Asker) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    say(&format!("engine at port {}", listener.local_addr()?.port()));
    thread::Builder::new().name("engine".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let (manner, asker) = (manner.clone(), asker.clone());
            // Without a thread for it the client sees the connection end.
            let _ = thread::Builder::new().spawn(move || {
                if let Err(error) = converse(&stream, &manner, &asker) {
                    say(&format!("hook ended: {error}"));
                }
            });
        }
    })?;
    Ok(())
}

fn converse(stream: &TcpStream, manner: &Manner, asker: &Asker) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (method, target) = request(stream)?;
    let tell = |what: fmt::Arguments<'_>| say(&format!("hook method={method} path={target} {what}"));
    match manner {
        Manner::Well => {
            let (status, freed, why) = match route(&method, &target) {
                Ok(wish) => match asker.ask(wish) {
                    Ok(bytes) => (200, bytes, String::new()),
                    Err(why) => (500, 0, why),
                },
                Err(status) => (status, 0, String::new()),
            };
            tell(format_args!("status={status} bytes={freed} {why}"));
            answer(stream, status, &[], "{}")
        }
        Manner::Hangs => {
            tell(format_args!("hangs"));
            stream.set_read_timeout(None)?;
            // Until the client gives up.
            let _ = (&*stream).read(&mut [0; 1]);
            Ok(())
        }
        Manner::Redirects(location) => {
            tell(format_args!("status=307 to={location}"));
            answer(stream, 307, &[("Location", location)], "")
        }
        Manner::Streams => {
            tell(format_args!("streams"));
            let mut stream = stream;
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
            let chunk = [CHUNK, &[b' '; 0x400], b"\r\n"].concat();
            // Ends when the client does not take any more.
            while stream.write_all(&chunk).is_ok() {}
            Ok(())
        }
        Manner::Fails => {
            tell(format_args!("status=500"));
            answer(stream, 500, &[], "no")
        }
    }
}

/// Method and target of a request, whose other lines and body do not matter here.
fn request(stream: &TcpStream) -> io::Result<(String, String)> {
    let mut head = BufReader::new(stream.take(LONGEST_HEAD));
    let mut first = String::new();
    head.read_line(&mut first)?;
    let mut line = String::new();
    loop {
        line.clear();
        if head.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
    }
    let mut words = first.split_whitespace();
    match (words.next(), words.next()) {
        (Some(method), Some(target)) => Ok((method.to_owned(), target.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a request")),
    }
}

fn answer(mut stream: &TcpStream, status: u16, headers: &[(&str, &str)], body: &str) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
    for (name, value) in headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    stream.write_all(format!("{head}\r\n{body}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errands::Errands;

    #[test]
    fn every_preset_of_an_engine_has_its_path() {
        assert_eq!(route("POST", "/reset_prefix_cache"), Ok(Wish::Flush));
        assert_eq!(route("POST", "/flush_cache"), Ok(Wish::Flush));
        assert_eq!(route("POST", "/v2/repository/models/llama/unload"), Ok(Wish::Flush));
        assert_eq!(route("POST", "/sleep?level=1"), Ok(Wish::Sleep));
        assert_eq!(route("POST", "/wake_up"), Ok(Wish::WakeUp));
        assert_eq!(route("POST", "/sleep?level=2"), Err(400));
        assert_eq!(route("GET", "/flush_cache"), Err(405));
        assert_eq!(route("POST", "/v2/repository/models//unload"), Err(404));
        assert_eq!(route("POST", "/"), Err(404));
    }

    /// What an engine of this manner answers; at most so many bytes of it.
    fn ask(manner: Manner, most: u64) -> String {
        let errands = Errands::new().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let asker = errands.asker();
        let serving = thread::spawn(move || converse(&server, &manner, &asker));
        client.write_all(b"POST /flush_cache HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        thread::scope(|scope| {
            let reading = scope.spawn(|| (&client).take(most).read_to_string(&mut text));
            while !reading.is_finished() {
                for errand in errands.take() {
                    errand.answer(Ok(5));
                }
                thread::yield_now();
            }
        });
        drop(client);
        let _ = serving.join().unwrap();
        text
    }

    #[test]
    fn it_answers_well_or_badly_as_it_is_told() {
        assert!(ask(Manner::Well, u64::MAX).starts_with("HTTP/1.1 200 "));
        assert!(ask(Manner::Fails, u64::MAX).starts_with("HTTP/1.1 500 "));
        assert!(
            ask(Manner::Redirects("http://else/".into()), u64::MAX).contains("Location: http://else/\r\n")
        );
        // However much is read, there is more.
        assert_eq!(ask(Manner::Streams, 200_000).len(), 200_000);
        assert_eq!(ask(Manner::Hangs, 0), "");
    }
}
