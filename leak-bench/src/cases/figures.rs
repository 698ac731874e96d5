//! The numbers in the words of a report: "48.6 MiB/h", "5->17GB/30min", "+86 then +2".
//!
//! A number without a unit is in MiB, and counts only where the row's start gives the scale.
//! Percentages, factors and what follows `@` (the context at which something was seen) are no sizes.

use crate::number::{GIB, MIB};

/// What something grows by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Per {
    /// So many seconds.
    Seconds(f64),
    /// So many events: requests, tokens, iterations, epochs.
    Events(f64),
}

/// A growth: between `low` and `high` bytes in each `per`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Growth {
    /// Bytes, at least.
    pub low: f64,
    /// Bytes, at most.
    pub high: f64,
    /// In how much time or work.
    pub per: Per,
}

/// All numbers of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// The first growth that is named.
    pub growth: Option<Growth>,
    /// Levels that were seen, in their order, in bytes.
    pub levels: Vec<f64>,
    /// Rises that were seen, in their order, in bytes, and the seconds that one took if named.
    pub rises: Vec<(f64, Option<f64>)>,
    /// Levels with the capacity that they were seen in, in bytes.
    pub of_capacity: Vec<(f64, f64)>,
    /// A capacity named by itself, in bytes.
    pub capacity: Option<f64>,
    /// In how much time or work the levels were passed through.
    pub through: Option<Per>,
}

impl Figures {
    /// Whether there is any number to render from.
    pub(crate) fn any(&self) -> bool {
        self.growth.is_some()
            || !self.levels.is_empty()
            || !self.rises.is_empty()
            || !self.of_capacity.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Word(String),
    Arrow,
    Symbol(char),
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut rest = text.chars().peekable();
    while let Some(&first) = rest.peek() {
        let mut run = |keep: &dyn Fn(char) -> bool| {
            let mut run = String::new();
            while let Some(&c) = rest.peek() {
                if !keep(c) {
                    break;
                }
                run.push(c);
                rest.next();
            }
            run
        };
        if first.is_ascii_digit() || first == '.' {
            let digits = run(&|c| c.is_ascii_digit() || c == '.');
            match digits.parse() {
                Ok(number) => tokens.push(Token::Number(number)),
                Err(_) => tokens.push(Token::Word(digits)),
            }
        } else if first.is_alphabetic() {
            tokens.push(Token::Word(run(&char::is_alphabetic)));
        } else {
            rest.next();
            if first == '-' && rest.peek() == Some(&'>') {
                rest.next();
                tokens.push(Token::Arrow);
            } else if !first.is_whitespace() && first != '~' {
                tokens.push(Token::Symbol(first));
            }
        }
    }
    tokens
}

fn unit(word: &str) -> Option<f64> {
    match word {
        "KiB" => Some(1024.0),
        "MiB" | "Mi" => Some(MIB),
        "GiB" => Some(GIB),
        "MB" => Some(1e6),
        "GB" => Some(1e9),
        _ => None,
    }
}

fn seconds(word: &str) -> Option<f64> {
    match word {
        "s" => Some(1.0),
        "min" => Some(60.0),
        "h" => Some(3600.0),
        "d" | "day" => Some(86_400.0),
        _ => None,
    }
}

/// A number with all that belongs to it.
#[derive(Clone, Copy, Debug)]
struct Quantity {
    low: f64,
    high: f64,
    sign: Option<char>,
    unit: Option<f64>,
    per: Option<Per>,
    capacity: Option<f64>,
    is_capacity: bool,
    after_arrow: bool,
}

struct Reader<'a> {
    rest: &'a [Token],
    before: Option<&'a Token>,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Option<&'a Token> {
        let (first, rest) = self.rest.split_first()?;
        (self.rest, self.before) = (rest, Some(first));
        Some(first)
    }

    fn symbol(&mut self, symbol: char) -> bool {
        let found = self.rest.first() == Some(&Token::Symbol(symbol));
        if found {
            self.next();
        }
        found
    }

    fn number(&mut self) -> Option<f64> {
        let Some(Token::Number(number)) = self.rest.first() else { return None };
        self.next();
        Some(*number)
    }

    fn word<T>(&mut self, of: impl Fn(&str) -> Option<T>) -> Option<T> {
        let Some(Token::Word(word)) = self.rest.first() else { return None };
        let found = of(word)?;
        self.next();
        Some(found)
    }

    /// `N`, or `N-M`.
    fn range(&mut self) -> Option<(f64, f64)> {
        let low = self.number()?;
        let high = match self.rest {
            [Token::Symbol('-'), Token::Number(high), ..] => {
                self.next();
                self.next();
                *high
            }
            _ => low,
        };
        Some((low, high))
    }

    /// What follows a `/` or `in`: `h`, `2min`, `8-10h`, `request`, `600 tokens`, `20k iters`.
    fn per(&mut self) -> Option<Per> {
        let number = self.range().map(|(low, high)| f64::midpoint(low, high));
        let thousands = self.word(|w| (w == "k").then_some(1000.0)).unwrap_or(1.0);
        let n = number.unwrap_or(1.0) * thousands;
        if let Some(s) = self.word(seconds) {
            return Some(Per::Seconds(n * s));
        }
        self.word(|w| (!w.is_empty()).then_some(Per::Events(n)))
    }

    fn quantity(&mut self) -> Option<Quantity> {
        let mut sign = None;
        let mut after_arrow = false;
        let mut is_capacity = false;
        loop {
            match self.rest.first()? {
                Token::Number(_) => break,
                Token::Symbol('@') => {
                    self.next();
                    self.range();
                }
                Token::Symbol(c @ ('+' | '-')) => {
                    sign = Some(*c);
                    self.next();
                    continue;
                }
                Token::Arrow => {
                    after_arrow = true;
                    self.next();
                    continue;
                }
                Token::Word(word) => {
                    is_capacity = word == "of";
                    self.next();
                    continue;
                }
                Token::Symbol(_) => {
                    self.next();
                }
            }
            sign = None;
        }
        // "rank 0", "iteration 1": a number that only names something.
        let names = matches!(self.before, Some(Token::Word(w)) if !["to", "of", "flat", "then", "peak", "free"].contains(&w.as_str()) && unit(w).is_none());
        let (low, high) = self.range()?;
        if self.symbol('%') || self.word(|w| (w == "x").then_some(())).is_some() {
            return self.quantity();
        }
        let own = self.word(unit);
        if names && own.is_none() {
            return self.quantity();
        }
        let mut quantity =
            Quantity { low, high, sign, unit: own, per: None, capacity: None, is_capacity, after_arrow };
        if self.symbol('/') {
            match self.rest {
                [Token::Number(capacity), Token::Word(w), ..]
                    if seconds(w).is_none() && unit(w).is_some() =>
                {
                    quantity.capacity = Some(*capacity);
                    quantity.unit = unit(w);
                    self.next();
                    self.next();
                }
                [Token::Number(capacity)]
                | [Token::Number(capacity), Token::Number(_) | Token::Symbol(_), ..]
                    if !matches!(self.rest.get(1), Some(Token::Symbol('-'))) =>
                {
                    quantity.capacity = Some(*capacity);
                    self.next();
                }
                _ => quantity.per = self.per(),
            }
        } else if self.word(|w| ["in", "at"].contains(&w).then_some(())).is_some() {
            quantity.per = self.per().filter(|per| matches!(per, Per::Seconds(_)));
        }
        Some(quantity)
    }
}

/// Reads the numbers of a report. `scaled`: numbers without a unit are MiB; otherwise they are
/// left out.
pub(crate) fn read(text: &str, scaled: bool) -> Figures {
    let tokens = tokens(text);
    let mut reader = Reader { rest: &tokens, before: None };
    let mut quantities = Vec::new();
    while let Some(quantity) = reader.quantity() {
        quantities.push(quantity);
    }
    // "10->12->24GB": the last of a chain or list names the unit of all.
    let mut later = None;
    for quantity in quantities.iter_mut().rev() {
        later = quantity.unit.or(later);
        quantity.unit = later;
    }
    let mut figures = Figures::default();
    for quantity in quantities {
        let Some(unit) = quantity.unit.or(scaled.then_some(MIB)) else { continue };
        let (low, high) = (quantity.low * unit, quantity.high * unit);
        let middle = f64::midpoint(low, high);
        let span = match quantity.per {
            Some(Per::Seconds(seconds)) => Some(seconds),
            _ => None,
        };
        match (quantity.capacity, quantity.sign, quantity.per) {
            (Some(capacity), ..) => figures.of_capacity.push((middle, capacity * unit)),
            _ if quantity.is_capacity => figures.capacity = Some(middle),
            (_, Some('-'), _) => {}
            (_, Some(_), per) => {
                figures.rises.push((middle, span));
                if let (Some(per), None) = (per, figures.growth) {
                    figures.growth = Some(Growth { low, high, per });
                }
            }
            (_, None, Some(per)) if !quantity.after_arrow => {
                figures.growth.get_or_insert(Growth { low, high, per });
            }
            (_, None, per) => {
                figures.levels.push(middle);
                figures.through = figures.through.or(per);
            }
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(text: &str) -> (f64, f64, Per) {
        let growth = read(text, true).growth.unwrap();
        ((growth.low / MIB * 100.0).round() / 100.0, (growth.high / MIB * 100.0).round() / 100.0, growth.per)
    }

    #[test]
    fn growth_is_read_per_time_and_per_work() {
        assert_eq!(growth("48.6 MiB/h (6.0->6.57GiB/12h)"), (48.6, 48.6, Per::Seconds(3600.0)));
        assert_eq!(growth("+100MiB/~4min under sweep"), (100.0, 100.0, Per::Seconds(240.0)));
        assert_eq!(growth("5-12 MiB/request (0.30->9.35GiB in 5.5h)"), (5.0, 12.0, Per::Events(1.0)));
        assert_eq!(growth("1 MB/600 tokens (~500MB @131k ctx)"), (0.95, 0.95, Per::Events(600.0)));
        assert_eq!(growth("+79MB/8-10h"), (75.34, 75.34, Per::Seconds(32_400.0)));
    }

    #[test]
    fn chains_and_lists_are_levels_with_the_unit_of_the_last() {
        let figures = read("410 MiB/min (5->17GB/30min) ~3x", true);
        assert_eq!(figures.levels, [5e9, 17e9]);
        assert_eq!(figures.through, Some(Per::Seconds(1800.0)));
        assert_eq!(read("4544 4563 4567 Mi", true).levels, [4544.0 * MIB, 4563.0 * MIB, 4567.0 * MIB]);
        let figures = read("0.7->1.5->22GB then flat 22266/24564", true);
        assert_eq!(figures.levels, [0.7e9, 1.5e9, 22e9]);
        assert_eq!(figures.of_capacity, [(22_266.0 * MIB, 24_564.0 * MIB)]);
        assert_eq!(read("12->24GB/20k iters", false).through, Some(Per::Events(20_000.0)));
    }

    #[test]
    fn capacities_are_told_from_levels() {
        let figures = read("9713 10845 ? 11133 MiB of 12196 (+1132 then ~144/epoch)", true);
        assert_eq!(figures.levels, [9713.0 * MIB, 10_845.0 * MIB, 11_133.0 * MIB]);
        assert_eq!(figures.capacity, Some(12_196.0 * MIB));
        assert_eq!(read("8/11 18/24 60/80 GB", true).of_capacity, [(8e9, 11e9), (18e9, 24e9), (60e9, 80e9)]);
    }

    #[test]
    fn rises_come_in_order() {
        let rises = |text| read(text, true).rises.iter().map(|r| r.0 / MIB).collect::<Vec<_>>();
        assert_eq!(rises("+86 then +2 then 0"), [86.0, 2.0]);
        assert_eq!(read("+6.9GiB/1.5h then plateau 12.4-12.8GiB", true).rises, [(6.9 * GIB, Some(5400.0))]);
        assert_eq!(read("+160 then flat (5680)", true).levels, [5680.0 * MIB]);
    }

    #[test]
    fn words_percentages_and_names_are_no_sizes() {
        assert!(!read("10%->~100% of host", false).any());
        assert!(!read("plot", true).any());
        assert!(read("+~20GB on rank 0", true).levels.is_empty());
        assert!(!read("rises after deploy then level (2.7)", false).any());
    }
}
