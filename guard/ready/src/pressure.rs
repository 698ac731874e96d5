//! What a pressure file says of readiness. The volume is the pod's own, which may put anything
//! there, so the whole text is read as JSON before one number of it is believed.

/// The field: until when the pod is unready, in milliseconds since the epoch.
const FIELD: &[u8] = b"unreadyUntil";
/// The agent says half a minute at a time. What lies further ahead is not of its writing.
const MOST_AHEAD: u64 = 10 * 60 * 1000;
/// Values within values.
const DEPTH: u32 = 32;

/// Whether the pod is to be unready at `now`.
pub(crate) fn is_unready(text: &[u8], now: u64) -> bool {
    match until(text) {
        Some(until) => until > now && until - now <= MOST_AHEAD,
        None => false,
    }
}

/// The field of a text that is one JSON object.
fn until(text: &[u8]) -> Option<u64> {
    let mut json = Json { rest: text };
    let mut found = None;
    json.space();
    json.eat(b'{')?;
    json.space();
    if json.eat(b'}').is_none() {
        loop {
            json.space();
            let name = json.string()?;
            json.space();
            json.eat(b':')?;
            json.space();
            if same(name, FIELD) {
                found = Some(json.whole()?);
            } else {
                json.value(DEPTH)?;
            }
            json.space();
            if json.eat(b',').is_none() {
                json.eat(b'}')?;
                break;
            }
        }
    }
    json.space();
    if json.rest.is_empty() { found } else { None }
}

/// Byte by byte, since comparing slices is a call of a library that is not there.
fn same(one: &[u8], other: &[u8]) -> bool {
    let (mut one, mut other) = (one, other);
    loop {
        match (one.split_first(), other.split_first()) {
            (None, None) => return true,
            (Some((a, one_rest)), Some((b, other_rest))) if a == b => (one, other) = (one_rest, other_rest),
            _ => return false,
        }
    }
}

/// What is left of a text.
struct Json<'a> {
    rest: &'a [u8],
}

impl<'a> Json<'a> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn next(&mut self) -> Option<u8> {
        let (byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*byte)
    }

    fn eat(&mut self, wanted: u8) -> Option<()> {
        if self.peek()? == wanted {
            self.next();
            Some(())
        } else {
            None
        }
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.next();
        }
    }

    /// A string, as it is written between its quotes.
    fn string(&mut self) -> Option<&'a [u8]> {
        self.eat(b'"')?;
        let text = self.rest;
        loop {
            match self.next()? {
                b'"' => break,
                b'\\' => match self.next()? {
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {}
                    b'u' => {
                        for _ in 0..4 {
                            if !self.next()?.is_ascii_hexdigit() {
                                return None;
                            }
                        }
                    }
                    _ => return None,
                },
                0..0x20 => return None,
                _ => {}
            }
        }
        let length = text.len().checked_sub(self.rest.len())?.checked_sub(1)?;
        text.get(..length)
    }

    /// A whole number that is not negative.
    fn whole(&mut self) -> Option<u64> {
        let zero = self.peek()? == b'0';
        let (mut number, mut digits) = (0_u64, 0_u32);
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            self.next();
            number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            digits += 1;
        }
        match self.peek() {
            Some(b'.' | b'e' | b'E') => None,
            _ if digits == 0 || (zero && digits > 1) => None,
            _ => Some(number),
        }
    }

    fn number(&mut self) -> Option<()> {
        let _sign = self.eat(b'-');
        let leading = self.peek();
        let whole = self.digits()?;
        if leading == Some(b'0') && whole > 1 {
            return None;
        }
        if self.eat(b'.').is_some() {
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.next();
            if let Some(b'+' | b'-') = self.peek() {
                self.next();
            }
            self.digits()?;
        }
        Some(())
    }

    /// How many digits come, at least one.
    fn digits(&mut self) -> Option<usize> {
        let before = self.rest.len();
        while let Some(b'0'..=b'9') = self.peek() {
            self.next();
        }
        let count = before.checked_sub(self.rest.len())?;
        if count == 0 { None } else { Some(count) }
    }

    fn word(&mut self, rest: &[u8]) -> Option<()> {
        let mut rest = rest;
        while let Some((byte, more)) = rest.split_first() {
            self.eat(*byte)?;
            rest = more;
        }
        Some(())
    }

    fn value(&mut self, depth: u32) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match self.peek()? {
            b'"' => self.string().map(|_| ()),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            b'{' => self.list(b'}', depth, true),
            b'[' => self.list(b']', depth, false),
            _ => self.number(),
        }
    }

    fn list(&mut self, end: u8, depth: u32, named: bool) -> Option<()> {
        self.next();
        self.space();
        if self.eat(end).is_some() {
            return Some(());
        }
        loop {
            self.space();
            if named {
                self.string()?;
                self.space();
                self.eat(b':')?;
                self.space();
            }
            self.value(depth)?;
            self.space();
            if self.eat(b',').is_none() {
                return self.eat(end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn says(text: &str) -> bool {
        is_unready(text.as_bytes(), NOW)
    }

    #[test]
    fn it_is_unready_until_then_and_no_longer() {
        let file = |until: u64| {
            format!(
                r#"{{"level":"Critical","batchAdvice":{{"numerator":1}},"unreadyUntil":{until},"at":"x"}}"#
            )
        };
        assert!(says(&file(NOW + 1)) && says(&file(NOW + 30_000)) && says(&file(NOW + MOST_AHEAD)));
        for until in [0, NOW - 1, NOW, NOW + MOST_AHEAD + 1, u64::MAX] {
            assert!(!says(&file(until)), "{until}");
        }
        assert!(says(&format!(" {{ \"unreadyUntil\" :\t{}\n}}\r\n", NOW + 5)));
    }

    #[test]
    fn whatever_else_the_file_is_the_pod_is_ready() {
        let until = NOW + 1000;
        for text in [
            String::new(),
            "null".into(),
            "{}".into(),
            format!("{until}"),
            format!("[{until}]"),
            format!("{{\"unreadyUntil\":{until}"),
            format!("{{\"unreadyUntil\":{until}}} x"),
            format!("{{\"unreadyUntil\":\"{until}\"}}"),
            format!("{{\"unreadyUntil\":-{until}}}"),
            format!("{{\"unreadyUntil\":{until}.0}}"),
            format!("{{\"unreadyUntil\":{until}e0}}"),
            format!("{{\"unreadyUntil\":0{until}}}"),
            format!("{{\"unreadyUntil\":{until}0000000000000000}}"),
            "{\"unreadyUntil\":null}".into(),
            "{\"unreadyUntil\":}".into(),
            // Not at the top.
            format!("{{\"a\":{{\"unreadyUntil\":{until}}}}}"),
            format!("{{\"a\":\"\\\"unreadyUntil\\\":{until}\"}}"),
            format!("{{\"unreadyuntil\":{until}}}"),
            // Broken elsewhere.
            format!("{{\"unreadyUntil\":{until},}}"),
            format!("{{\"unreadyUntil\":{until},\"a\":tru}}"),
            format!("{{\"unreadyUntil\":{until},\"a\":\"\n\"}}"),
            format!("{{\"unreadyUntil\":{until},\"a\":\"\\u12g4\"}}"),
            format!("{{\"unreadyUntil\":{until},\"a\":01}}"),
            format!("{{\"unreadyUntil\":{until},\"a\":{}}}", "[".repeat(1000)),
            format!("\u{feff}{{\"unreadyUntil\":{until}}}"),
        ] {
            assert!(!says(&text), "{text}");
        }
        assert!(!is_unready(&[0; 64], NOW) && !is_unready(&[0xff; 64], NOW));
    }

    #[test]
    fn every_kind_of_value_may_stand_beside_it() {
        let others = r#""a":[1,-2.5e-3,true,false,null,[],{}],"b":{"c":"\u00e4\n","d":[{"e":0}]},"f":"ä""#;
        assert!(says(&format!("{{{others},\"unreadyUntil\":{}}}", NOW + 1)));
        // Of two the last counts, as for other readers.
        assert!(!says(&format!("{{\"unreadyUntil\":{},\"unreadyUntil\":1}}", NOW + 1)));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_none() {
        let whole = format!("{{\"level\":\"Critical\",\"unreadyUntil\":{},\"at\":\"2026\"}}", NOW + 1);
        assert!(says(&whole));
        for end in 0..whole.len() {
            assert!(!says(&whole[..end]), "{}", &whole[..end]);
        }
    }
}
