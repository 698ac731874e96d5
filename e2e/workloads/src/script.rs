//! The language of workload scripts.
//!
//! Statements stand one a line or apart by `;`. What follows `#` on a line is a comment. A block
//! in braces belongs to `fork`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::engine::Manner;
use crate::pressure::Heeded;
use crate::units::{parse_duration, parse_rate, parse_size};

/// A whole script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Script(pub(crate) Vec<Statement>);

/// One step of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Statement {
    /// `device N`: the device for everything after it.
    Device(i32),
    /// `context`: makes the context; statements that need one make it otherwise.
    Context,
    /// `alloc 2Gi` and its like: takes memory in one of the ways that there are.
    Take(Way, u64),
    /// `expect-oom OP SIZE`, `expect-oom context`: goes on only if the driver refuses with exactly
    /// CUDA_ERROR_OUT_OF_MEMORY.
    ExpectRefusal(Option<(Way, u64)>),
    /// `share 1Gi at PATH`: memory made without a context, with a descriptor for whoever connects
    /// to a socket there.
    Share { bytes: u64, path: PathBuf },
    /// `import PATH [map]`: memory by a descriptor from such a socket.
    Import { path: PathBuf, map: bool },
    /// `keep PATH`: such a descriptor alone, without the driver.
    Keep(PathBuf),
    /// `offer 1Gi at PATH`: takes memory, and writes a file by which another process can open it.
    Offer { bytes: u64, path: PathBuf },
    /// `open PATH`: opens another process's memory.
    Open(PathBuf),
    /// `info`: prints what driver and NVML say about the device's memory.
    Info,
    /// `synchronize`: waits for the device; pools give back what they do not use.
    Synchronize,
    /// `trim`: the device's own pool and its graphs give back what they do not use.
    Trim,
    /// `touch`: writes to everything held.
    Touch,
    /// `grow 512Mi/s to 8Gi`: until so much is held.
    Grow { bytes_per_second: u64, target: u64 },
    /// `leak 64Mi every 500ms [xN]`: for ever, or N times.
    Leak { bytes: u64, every: Duration, times: Option<u64> },
    /// `spike 4Gi for 200ms`
    Spike { bytes: u64, lasting: Duration },
    /// `hold 5s`, or `hold` for ever.
    Hold(Option<Duration>),
    /// `free 2Gi`: the newest allocations, at least so much; or `free` everything.
    Free(Option<u64>),
    /// `fork N { ... }`: children that follow the script in braces.
    Fork { children: u32, script: String },
    /// `ignore-sigterm`
    IgnoreTermination,
    /// `watch-pressure PATH`: prints the file's content at each change, from here on.
    WatchPressure(PathBuf),
    /// `cache 8Gi`: takes memory that `engine` and `heed` give back.
    Cache(u64),
    /// `engine 8000 [hangs|redirects URL|streams|fails]`: serves an engine's control endpoints, well
    /// or badly.
    Engine { port: u16, manner: Manner },
    /// `heed level|unready PATH`: gives the cache back when a pressure file says that memory is short,
    /// or that the pod is to take no requests.
    Heed { what: Heeded, path: PathBuf },
    /// `retain`: the device's own pool keeps what is freed, as allocators ask it to.
    Retain,
    /// `swing 4Gi every 200ms xN`: takes it for so long, and gives it back for so long.
    Swing { bytes: u64, every: Duration, times: u64 },
    /// `serve`: a heartbeat every second, for ever.
    Serve,
    /// `on-oom exit 3|continue|retry`: what to do when memory is refused, from here on.
    OnRefusal(OnRefusal),
    /// `exit N`: at once, whatever children do.
    Exit(u8),
}

/// The ways to take memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocPitch`: in rows.
    Pitch,
    /// `cuMemAllocManaged`: takes room on the device only when touched.
    Managed,
    /// `cuMemCreate` alone: made without a context, so that no process list shows it.
    Physical,
    /// `cuMemCreate`, mapped, and the handle released.
    Mapped,
    /// `cuMemAllocAsync`: from the device's own pool.
    Async,
    /// `cuMemAllocFromPoolAsync`: from a pool of its own.
    Pool,
    /// `cuArrayCreate`.
    Array,
    /// A node of a graph that is launched.
    Graph,
    /// Taken and given back while a stream is captured into a graph, which is launched.
    Capture,
    /// `cuMemHostAlloc`: memory of the host.
    Host,
}

impl Way {
    /// All of them, by the words of scripts.
    const ALL: [(&'static str, Self); 12] = [
        ("alloc", Self::Plain),
        ("pitch", Self::Pitch),
        ("managed", Self::Managed),
        ("physical", Self::Physical),
        ("create", Self::Physical),
        ("vmm", Self::Mapped),
        ("async", Self::Async),
        ("pool", Self::Pool),
        ("array", Self::Array),
        ("graph", Self::Graph),
        ("capture", Self::Capture),
        ("host", Self::Host),
    ];

    fn by_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, way)| *way)
    }

    /// Its first word in scripts.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, way)| *way == self).map_or("", |(name, _)| *name)
    }
}

/// What to do when memory is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRefusal {
    /// End with this status.
    Exit(u8),
    /// Go on without.
    Continue,
    /// Ask again until there is enough.
    Retry,
}

/// What is wrong with a script, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParseError {
    /// Counted from 1, over the statements of the outermost block.
    number: usize,
    statement: String,
    reason: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "statement {} `{}`: {}", self.number, self.statement, self.reason)
    }
}

impl std::error::Error for ParseError {}

impl Script {
    /// Reads a script, with the scripts inside it.
    pub(crate) fn parse(text: &str) -> Result<Self, ParseError> {
        let mut statements = Vec::new();
        for (index, text) in split(text)?.iter().enumerate() {
            let wrong = |reason| ParseError { number: index + 1, statement: text.clone(), reason };
            statements.push(Statement::parse(text).map_err(wrong)?);
        }
        Ok(Self(statements))
    }
}

impl Statement {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("fork") {
            return parse_fork(rest);
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        Ok(match words.as_slice() {
            ["device", number] => {
                Self::Device(number.parse().map_err(|_| format!("{number:?} is no device number"))?)
            }
            ["context"] => Self::Context,
            ["expect-oom", "context"] => Self::ExpectRefusal(None),
            ["expect-oom", name, size] => {
                let way = Way::by_name(name).ok_or_else(|| usage("expect-oom"))?;
                Self::ExpectRefusal(Some((way, positive(size)?)))
            }
            ["share", size, "at", path] => Self::Share { bytes: positive(size)?, path: path.into() },
            ["import", path] => Self::Import { path: path.into(), map: false },
            ["import", path, "map"] => Self::Import { path: path.into(), map: true },
            ["keep", path] => Self::Keep(path.into()),
            ["offer", size, "at", path] => Self::Offer { bytes: positive(size)?, path: path.into() },
            ["open", path] => Self::Open(path.into()),
            ["info"] => Self::Info,
            ["synchronize"] => Self::Synchronize,
            ["trim"] => Self::Trim,
            ["touch"] => Self::Touch,
            ["grow", rate, "to", size] => {
                Self::Grow { bytes_per_second: parse_rate(rate)?, target: positive(size)? }
            }
            ["leak", size, "every", duration] => {
                Self::Leak { bytes: positive(size)?, every: parse_duration(duration)?, times: None }
            }
            ["leak", size, "every", duration, times] => {
                let times = Some(parse_times(times)?);
                Self::Leak { bytes: positive(size)?, every: parse_duration(duration)?, times }
            }
            ["spike", size, "for", duration] => {
                Self::Spike { bytes: positive(size)?, lasting: parse_duration(duration)? }
            }
            ["hold"] => Self::Hold(None),
            ["hold", duration] => Self::Hold(Some(parse_duration(duration)?)),
            ["free"] => Self::Free(None),
            ["free", size] => Self::Free(Some(positive(size)?)),
            ["ignore-sigterm"] => Self::IgnoreTermination,
            ["watch-pressure", path] => Self::WatchPressure(PathBuf::from(path)),
            ["cache", size] => Self::Cache(positive(size)?),
            ["engine", port, manner @ ..] => {
                Self::Engine { port: parse_port(port)?, manner: parse_manner(manner)? }
            }
            ["heed", "level", path] => Self::Heed { what: Heeded::Level, path: path.into() },
            ["heed", "unready", path] => Self::Heed { what: Heeded::Unready, path: path.into() },
            ["retain"] => Self::Retain,
            ["swing", size, "every", duration, times] => Self::Swing {
                bytes: positive(size)?,
                every: parse_duration(duration)?,
                times: parse_times(times)?,
            },
            ["serve"] => Self::Serve,
            ["on-oom", "continue"] => Self::OnRefusal(OnRefusal::Continue),
            ["on-oom", "retry"] => Self::OnRefusal(OnRefusal::Retry),
            ["on-oom", "exit", status] => Self::OnRefusal(OnRefusal::Exit(parse_status(status)?)),
            ["exit", status] => Self::Exit(parse_status(status)?),
            [name, rest @ ..] => match (Way::by_name(name), rest) {
                (Some(way), [size]) => Self::Take(way, positive(size)?),
                _ => return Err(usage(name)),
            },
            [] => return Err("nothing here".into()),
        })
    }
}

fn usage(name: &str) -> String {
    const FORMS: [(&str, &str); 40] = [
        ("device", "device N"),
        ("context", "context"),
        ("alloc", "alloc SIZE"),
        ("pitch", "pitch SIZE"),
        ("managed", "managed SIZE"),
        ("physical", "physical SIZE"),
        ("create", "create SIZE"),
        ("vmm", "vmm SIZE"),
        ("async", "async SIZE"),
        ("pool", "pool SIZE"),
        ("array", "array SIZE"),
        ("graph", "graph SIZE"),
        ("capture", "capture SIZE"),
        ("host", "host SIZE"),
        ("expect-oom", "expect-oom context, or expect-oom and one of the above that take memory"),
        ("share", "share SIZE at PATH"),
        ("import", "import PATH [map]"),
        ("keep", "keep PATH"),
        ("offer", "offer SIZE at PATH"),
        ("open", "open PATH"),
        ("info", "info"),
        ("synchronize", "synchronize"),
        ("trim", "trim"),
        ("touch", "touch"),
        ("grow", "grow SIZE/s to SIZE"),
        ("leak", "leak SIZE every DURATION [xN]"),
        ("spike", "spike SIZE for DURATION"),
        ("hold", "hold [DURATION]"),
        ("free", "free [SIZE]"),
        ("fork", "fork N { SCRIPT }"),
        ("ignore-sigterm", "ignore-sigterm"),
        ("watch-pressure", "watch-pressure PATH"),
        ("cache", "cache SIZE"),
        ("engine", "engine PORT [hangs|redirects URL|streams|fails]"),
        ("heed", "heed level|unready PATH"),
        ("retain", "retain"),
        ("swing", "swing SIZE every DURATION xN"),
        ("serve", "serve"),
        ("on-oom", "on-oom exit N|continue|retry"),
        ("exit", "exit N"),
    ];
    match FORMS.iter().find(|(known, _)| *known == name) {
        Some((_, form)) => format!("write `{form}`"),
        None => format!("no such statement; there are {}", FORMS.map(|(name, _)| name).join(", ")),
    }
}

fn parse_fork(rest: &str) -> Result<Statement, String> {
    let (count, block) = rest.split_once('{').ok_or_else(|| usage("fork"))?;
    let script = block.trim_end().strip_suffix('}').ok_or_else(|| usage("fork"))?.trim();
    let children = count.trim().parse().ok().filter(|count| (1..=1024).contains(count));
    let children =
        children.ok_or_else(|| format!("{:?} is no number of children from 1 to 1024", count.trim()))?;
    Script::parse(script).map_err(|error| format!("in the children's script: {error}"))?;
    Ok(Statement::Fork { children, script: script.to_owned() })
}

fn positive(size: &str) -> Result<u64, String> {
    match parse_size(size)? {
        0 => Err("a size of 0 does nothing".into()),
        bytes => Ok(bytes),
    }
}

fn parse_times(times: &str) -> Result<u64, String> {
    let number = times.strip_prefix('x').and_then(|number| number.parse().ok());
    number.ok_or_else(|| format!("{times:?}: write how often as x10"))
}

fn parse_port(port: &str) -> Result<u16, String> {
    port.parse().ok().filter(|port| *port > 0).ok_or_else(|| format!("{port:?} is no port from 1 to 65535"))
}

fn parse_manner(words: &[&str]) -> Result<Manner, String> {
    Ok(match words {
        [] => Manner::Well,
        ["hangs"] => Manner::Hangs,
        ["redirects", url] => Manner::Redirects((*url).to_owned()),
        ["streams"] => Manner::Streams,
        ["fails"] => Manner::Fails,
        _ => return Err(usage("engine")),
    })
}

fn parse_status(status: &str) -> Result<u8, String> {
    status.parse().map_err(|_| format!("{status:?} is no exit status from 0 to 255"))
}

/// The statements of the outermost block, each trimmed, without comments and empty ones.
fn split(text: &str) -> Result<Vec<String>, ParseError> {
    let mut statements = vec![String::new()];
    let mut depth = 0_usize;
    let mut comment = false;
    for character in text.chars() {
        match character {
            '\n' => comment = false,
            '#' => comment = true,
            _ => {}
        }
        if comment {
            continue;
        }
        let ends = depth == 0 && matches!(character, ';' | '\n');
        let opens = character == '{';
        let closes = character == '}';
        depth += usize::from(opens);
        if closes && depth == 0 {
            return Err(unbalanced(&statements, "a `}` without its `{`"));
        }
        depth -= usize::from(closes);
        if ends {
            statements.push(String::new());
        } else if let Some(statement) = statements.last_mut() {
            statement.push(character);
            // A block ends its statement, so that the next may stand on the same line.
            if closes && depth == 0 {
                statements.push(String::new());
            }
        }
    }
    if depth > 0 {
        return Err(unbalanced(&statements, "a `{` without its `}`"));
    }
    let trimmed = statements.iter().map(|statement| statement.trim().to_owned());
    Ok(trimmed.filter(|statement| !statement.is_empty()).collect())
}

fn unbalanced(statements: &[String], reason: &str) -> ParseError {
    let full = statements.iter().map(|statement| statement.trim()).filter(|statement| !statement.is_empty());
    let statement = full.clone().next_back().unwrap_or_default().to_owned();
    ParseError { number: full.count(), statement, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn parse(text: &str) -> Vec<Statement> {
        Script::parse(text).unwrap().0
    }

    fn error(text: &str) -> String {
        Script::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn every_statement_is_understood() {
        let script = "device 1; context; alloc 2Gi; managed 1Gi; physical 4Mi; create 4Mi; touch
            pitch 1Gi; vmm 1Gi; async 1Gi; pool 1Gi; array 1Gi; graph 1Gi; capture 1Gi; host 1Gi
            expect-oom vmm 2Gi; expect-oom context; info; synchronize; trim
            share 1Gi at /s; import /s; import /s map; keep /s; offer 1Gi at /o; open /o
            grow 512Mi/s to 8Gi
            leak 64Mi every 500ms; leak 64Mi every 1s x10
            spike 4Gi for 200ms; hold 5s; hold; free; free 2Gi
            ignore-sigterm; watch-pressure /highwater/pressure; serve
            cache 1Gi; engine 8000; engine 1 hangs; engine 2 redirects http://x/y; engine 3 streams; engine 4 fails
            heed level /p; heed unready /p; retain; swing 1Gi every 500ms x3
            on-oom exit 3; on-oom continue; on-oom retry; exit 7";
        let (second, half) = (Duration::from_secs(1), Duration::from_millis(500));
        assert_eq!(
            parse(script),
            [
                Statement::Device(1),
                Statement::Context,
                Statement::Take(Way::Plain, 2 * GIB),
                Statement::Take(Way::Managed, GIB),
                Statement::Take(Way::Physical, 4 * MIB),
                Statement::Take(Way::Physical, 4 * MIB),
                Statement::Touch,
                Statement::Take(Way::Pitch, GIB),
                Statement::Take(Way::Mapped, GIB),
                Statement::Take(Way::Async, GIB),
                Statement::Take(Way::Pool, GIB),
                Statement::Take(Way::Array, GIB),
                Statement::Take(Way::Graph, GIB),
                Statement::Take(Way::Capture, GIB),
                Statement::Take(Way::Host, GIB),
                Statement::ExpectRefusal(Some((Way::Mapped, 2 * GIB))),
                Statement::ExpectRefusal(None),
                Statement::Info,
                Statement::Synchronize,
                Statement::Trim,
                Statement::Share { bytes: GIB, path: "/s".into() },
                Statement::Import { path: "/s".into(), map: false },
                Statement::Import { path: "/s".into(), map: true },
                Statement::Keep("/s".into()),
                Statement::Offer { bytes: GIB, path: "/o".into() },
                Statement::Open("/o".into()),
                Statement::Grow { bytes_per_second: 512 * MIB, target: 8 * GIB },
                Statement::Leak { bytes: 64 * MIB, every: half, times: None },
                Statement::Leak { bytes: 64 * MIB, every: second, times: Some(10) },
                Statement::Spike { bytes: 4 * GIB, lasting: Duration::from_millis(200) },
                Statement::Hold(Some(Duration::from_secs(5))),
                Statement::Hold(None),
                Statement::Free(None),
                Statement::Free(Some(2 * GIB)),
                Statement::IgnoreTermination,
                Statement::WatchPressure("/highwater/pressure".into()),
                Statement::Serve,
                Statement::Cache(GIB),
                Statement::Engine { port: 8000, manner: Manner::Well },
                Statement::Engine { port: 1, manner: Manner::Hangs },
                Statement::Engine { port: 2, manner: Manner::Redirects("http://x/y".into()) },
                Statement::Engine { port: 3, manner: Manner::Streams },
                Statement::Engine { port: 4, manner: Manner::Fails },
                Statement::Heed { what: Heeded::Level, path: "/p".into() },
                Statement::Heed { what: Heeded::Unready, path: "/p".into() },
                Statement::Retain,
                Statement::Swing { bytes: GIB, every: half, times: 3 },
                Statement::OnRefusal(OnRefusal::Exit(3)),
                Statement::OnRefusal(OnRefusal::Continue),
                Statement::OnRefusal(OnRefusal::Retry),
                Statement::Exit(7),
            ]
        );
    }

    #[test]
    fn comments_and_empty_statements_are_nothing() {
        assert_eq!(parse("# all of it\n\n;; context # one; two\n"), [Statement::Context]);
        assert_eq!(parse(""), []);
    }

    #[test]
    fn a_block_keeps_its_statements_together() {
        let fork = |children, script: &str| Statement::Fork { children, script: script.into() };
        assert_eq!(
            parse("fork 2 { alloc 1Gi; hold }; exit 0"),
            [fork(2, "alloc 1Gi; hold"), Statement::Exit(0)]
        );
        assert_eq!(
            parse("fork 1 {\n  fork 3 { hold }\n}\nhold"),
            [fork(1, "fork 3 { hold }"), Statement::Hold(None)]
        );
    }

    #[test]
    fn an_error_names_the_statement_and_what_to_write() {
        assert_eq!(error("context; alloc"), "statement 2 `alloc`: write `alloc SIZE`");
        assert!(error("aloc 2Gi").contains("no such statement; there are device, context, alloc"));
        assert!(error("alloc 2Gb").contains("`alloc 2Gb`"));
        assert!(error("alloc 0").contains("does nothing"));
        assert!(error("grow 512Mi to 8Gi").contains("512Mi"));
        assert!(error("leak 64Mi every 1s 10").contains("x10"));
        assert!(error("exit 256").contains("0 to 255"));
        assert!(error("engine 70000").contains("1 to 65535"));
        assert!(error("engine 80 smiles").contains("write `engine PORT"));
        assert!(error("expect-oom hold 1s").contains("write `expect-oom"));
        assert!(error("vmm 1Gi 2Gi").contains("write `vmm SIZE`"));
        assert!(error("hold 5 s").contains("write `hold [DURATION]`"));
    }

    #[test]
    fn an_error_inside_a_block_is_found_before_anything_runs() {
        let error = error("context\nfork 2 { hold; frob }");
        assert!(
            error.starts_with("statement 2 `fork 2 { hold; frob }`: in the children's script"),
            "{error}"
        );
        assert!(error.contains("statement 2 `frob`"), "{error}");
    }

    #[test]
    fn braces_must_match() {
        assert!(error("fork 1 { hold").contains("a `{` without its `}`"));
        assert!(error("hold }").contains("a `}` without its `{`"));
        assert!(error("fork { hold }").contains("number of children"));
        assert!(error("fork 2").contains("write `fork N { SCRIPT }`"));
    }
}
