//! Commands on keys against a map whose keys end.

use std::collections::BTreeMap;

use ringserve::testing::Faults;

use super::*;

const UNIX_START: i64 = super::UNIX_START.as_millis() as i64;

/// No reply takes longer, and no key ends sooner.
const BATCH_MILLIS: u64 = 60_000;

/// The state that the server should hold of one client's keys. Times are virtual milliseconds. A
/// command ran at some time between its sending and its reply, so an end is known to lie between
/// two times.
#[derive(Default)]
struct Model {
    keys: BTreeMap<String, (String, Option<(i64, i64)>)>,
}

/// When a command ran: at the earliest, and at the latest.
type Span = (i64, i64);

/// The end that an expiry command sets.
fn end_of(unit: &str, time: i64, span: Span) -> (i64, i64) {
    // The shard's milliseconds are cut off.
    let (first, last) = (span.0 - 1, span.1 + 1);
    match unit {
        "ex" | "expire" => (first + time * 1000, last + time * 1000),
        "px" | "pexpire" => (first + time, last + time),
        "exat" | "expireat" => (time * 1000 - UNIX_START - 1, time * 1000 - UNIX_START + 1),
        _ => (time - UNIX_START - 1, time - UNIX_START + 1),
    }
}

impl Model {
    /// Forgets keys that came to their end before `now`, and tells until when to wait for those
    /// that are about to.
    fn pass(&mut self, now: i64) -> Option<i64> {
        self.keys.retain(|_, (_, end)| end.is_none_or(|(_, last)| last >= now));
        let ends = self.keys.values().filter_map(|(_, end)| *end);
        ends.filter(|(first, _)| *first <= now + BATCH_MILLIS as i64).map(|(_, last)| last + 1).max()
    }

    fn string(&self, key: &str) -> String {
        self.keys.get(key).map_or("nil".to_owned(), |(value, _)| format!("\"{value}\""))
    }

    /// Runs a command, and compares the reply.
    fn check(&mut self, words: &[String], got: &str, span: Span) {
        let args: Vec<&str> = words.iter().map(String::as_str).collect();
        let count =
            |keys: &[&str], model: &Model| keys.iter().filter(|key| model.keys.contains_key(**key)).count();
        let name = args[0].to_ascii_lowercase();
        let expected = match (&name[..], &args[1..]) {
            ("get", [key]) => self.string(key),
            ("set", [key, value, options @ ..]) => self.set(key, value, options, span),
            ("incr", [key]) => self.add(key, "1"),
            ("decr", [key]) => self.add(key, "-1"),
            ("incrby", [key, amount]) => self.add(key, amount),
            ("decrby", [key, amount]) => match amount.parse::<i64>().ok().map(i64::checked_neg) {
                Some(Some(amount)) => self.add(key, &amount.to_string()),
                Some(None) => "-ERR decrement would overflow".to_owned(),
                None => self.add(key, amount),
            },
            ("append", [key, more]) => {
                let value = &mut self.keys.entry((*key).to_owned()).or_default().0;
                value.push_str(more);
                format!(":{}", value.len())
            }
            ("strlen", [key]) => format!(":{}", self.keys.get(*key).map_or(0, |(value, _)| value.len())),
            ("mget", keys) => {
                let values: Vec<String> = keys.iter().map(|key| self.string(key)).collect();
                format!("[{}]", values.join(" "))
            }
            ("mset", pairs) if pairs.len() % 2 == 0 => {
                for pair in pairs.chunks(2) {
                    self.keys.insert(pair[0].to_owned(), (pair[1].to_owned(), None));
                }
                "+OK".to_owned()
            }
            ("del", keys) => {
                format!(":{}", keys.iter().filter(|key| self.keys.remove(**key).is_some()).count())
            }
            ("exists", keys) => format!(":{}", count(keys, self)),
            ("type", [key]) => format!("+{}", if count(&[*key], self) == 1 { "string" } else { "none" }),
            ("ttl" | "pttl", [key]) => match self.keys.get(*key) {
                None => ":-2".to_owned(),
                Some((_, None)) => ":-1".to_owned(),
                Some((_, Some((first, last)))) => {
                    let unit = if name == "ttl" { 1000 } else { 1 };
                    let left = |time: i64| (time + unit / 2).div_euclid(unit);
                    let told: i64 =
                        got.strip_prefix(':').and_then(|told| told.parse().ok()).expect("a number");
                    let (least, most) = (left(first - span.1 - 1), left(last - span.0 + 1));
                    assert!((least..=most).contains(&told), "{words:?}: {told} and not {least} to {most}");
                    return;
                }
            },
            ("expire" | "pexpire" | "expireat" | "pexpireat", [key, time, conditions @ ..]) => {
                self.expire(&name, key, time, conditions, got, span)
            }
            ("echo", [text]) => format!("\"{text}\""),
            ("ping", []) => "+PONG".to_owned(),
            ("ping", [text]) => format!("\"{text}\""),
            _ => format!("-ERR wrong number of arguments for '{name}' command"),
        };
        assert_eq!(got, expected, "{words:?}");
    }

    fn set(&mut self, key: &str, value: &str, options: &[&str], span: Span) -> String {
        let (mut end, mut keeps, mut only_if, mut get) = (None, false, None, false);
        let mut options = options.iter();
        while let Some(option) = options.next() {
            match *option {
                "nx" => only_if = Some(false),
                "xx" => only_if = Some(true),
                "get" => get = true,
                "keepttl" => keeps = true,
                unit => match options.next().expect("a time").parse::<i64>() {
                    Ok(1..) | Err(_) if end.is_some() => panic!("one end"),
                    Ok(time @ 1..) => end = Some(end_of(unit, time, span)),
                    Ok(_) => return "-ERR invalid expire time in 'set' command".to_owned(),
                    Err(_) => return "-ERR value is not an integer or out of range".to_owned(),
                },
            }
        }
        let (before, exists) = (self.string(key), self.keys.contains_key(key));
        let allowed = only_if.is_none_or(|wanted| wanted == exists);
        if allowed {
            let kept = self.keys.get(key).and_then(|(_, end)| *end).filter(|_| keeps);
            self.keys.insert(key.to_owned(), (value.to_owned(), end.or(kept)));
            if end.is_some_and(|(_, last)| last < span.0) {
                self.keys.remove(key);
            }
        }
        match (get, allowed) {
            (true, _) => before,
            (false, true) => "+OK".to_owned(),
            (false, false) => "nil".to_owned(),
        }
    }

    fn add(&mut self, key: &str, amount: &str) -> String {
        let canonical = |text: &str| text.parse::<i64>().ok().filter(|number| number.to_string() == text);
        let value = self.keys.get(key).map_or("0", |(value, _)| value);
        let (Some(amount), Some(before)) = (canonical(amount), canonical(value)) else {
            return "-ERR value is not an integer or out of range".to_owned();
        };
        let Some(after) = before.checked_add(amount) else {
            return "-ERR increment or decrement would overflow".to_owned();
        };
        self.keys.entry(key.to_owned()).or_default().0 = after.to_string();
        format!(":{after}")
    }

    fn expire(
        &mut self,
        name: &str,
        key: &str,
        time: &str,
        conditions: &[&str],
        got: &str,
        span: Span,
    ) -> String {
        let Ok(time) = time.parse() else { return "-ERR value is not an integer or out of range".to_owned() };
        let Some((_, end)) = self.keys.get_mut(key) else { return ":0".to_owned() };
        let new = end_of(name, time, span);
        let later = |a: (i64, i64), b: (i64, i64)| (a.0 > b.1 || a.1 < b.0).then_some(a.0 > b.1);
        // Whether it is later than the old end, if both are far enough apart.
        let is_later = end.map_or(Some(false), |old| later(new, old));
        let allowed = match conditions {
            [] => Some(true),
            ["nx"] => Some(end.is_none()),
            ["xx"] => Some(end.is_some()),
            ["gt"] => is_later,
            ["lt"] => {
                if end.is_none() {
                    Some(true)
                } else {
                    is_later.map(|later| !later)
                }
            }
            ["xx", "lt"] => {
                if end.is_none() {
                    Some(false)
                } else {
                    is_later.map(|later| !later)
                }
            }
            other => panic!("{other:?}"),
        };
        let allowed = allowed.unwrap_or(got == ":1");
        if allowed {
            *end = Some(new);
            // From now on, or since 1970.
            if time <= 0 || new.1 < span.0 {
                self.keys.remove(key);
            }
        }
        format!(":{}", u8::from(allowed))
    }
}

/// The commands that a client sends.
struct Chance<'a> {
    net: &'a Net,
    client: usize,
}

impl Chance<'_> {
    fn of(&self, count: u64) -> u64 {
        self.net.random() % count
    }

    fn pick<'a>(&self, all: &[&'a str]) -> &'a str {
        all[self.of(all.len() as u64) as usize]
    }

    fn key(&self) -> String {
        format!("key:{}:{}", self.client, self.of(8))
    }

    fn keys(&self) -> Vec<String> {
        (0..1 + self.of(6)).map(|_| self.key()).collect()
    }

    fn value(&self) -> String {
        match self.of(6) {
            0 => self.of(100).to_string(),
            1 => self
                .pick(&["", "9223372036854775807", "-9223372036854775808", "007", "-0", "+1", " 1"])
                .to_owned(),
            2 => "a\r\n$-1\r\n\"'\\ ".to_owned(),
            3 => "v".repeat(self.of(400) as usize),
            _ => format!("v{}", self.of(1000)),
        }
    }

    /// A time for a command or an option: far enough that it does not come within a batch, or long
    /// past.
    fn time(&self, unit: &str) -> String {
        let seconds = [100, 1_000, 3_600, 86_400, 30 * 86_400][self.of(5) as usize] as i64;
        let unix = UNIX_START + self.net.now().as_millis() as i64;
        match unit {
            "ex" | "expire" => seconds,
            "px" | "pexpire" => seconds * 1000 + self.of(1000) as i64,
            // Seconds are cut off.
            "exat" | "expireat" => unix / 1000 + seconds,
            _ => unix + seconds * 1000,
        }
        .to_string()
    }

    fn set(&self) -> Vec<String> {
        let mut words = vec!["set".to_owned(), self.key(), self.value()];
        let mut options = Vec::new();
        match self.of(4) {
            0 => options.push(vec!["nx".to_owned()]),
            1 => options.push(vec!["xx".to_owned()]),
            _ => {}
        }
        if self.of(4) == 0 {
            options.push(vec!["get".to_owned()]);
        }
        match self.of(8) {
            0 => options.push(vec!["keepttl".to_owned()]),
            1 => options
                .push(vec![self.pick(&["ex", "px"]).to_owned(), self.pick(&["0", "-1", "x"]).to_owned()]),
            2 => options.push(vec![self.pick(&["exat", "pxat"]).to_owned(), "1".to_owned()]),
            3..=5 => {
                let unit = self.pick(&["ex", "px", "exat", "pxat"]);
                options.push(vec![unit.to_owned(), self.time(unit)]);
            }
            _ => {}
        }
        while !options.is_empty() {
            words.extend(options.swap_remove(self.of(options.len() as u64) as usize));
        }
        words
    }

    fn command(&self) -> Vec<String> {
        let words = |name: &str, rest: Vec<String>| [vec![name.to_owned()], rest].concat();
        let mut command = match self.of(20) {
            0..=4 => self.set(),
            5 => words(self.pick(&["get", "strlen", "type"]), vec![self.key()]),
            6 => words(self.pick(&["incr", "decr"]), vec![self.key()]),
            7 => {
                let amounts = ["5", "-7", "9223372036854775807", "-9223372036854775808", "x"];
                words(self.pick(&["incrby", "decrby"]), vec![self.key(), self.pick(&amounts).to_owned()])
            }
            8 => words("append", vec![self.key(), self.value()]),
            9 | 10 => words("mget", self.keys()),
            11 => words("mset", self.keys().into_iter().flat_map(|key| [key, self.value()]).collect()),
            12 => words("del", self.keys()),
            13 => words("exists", self.keys()),
            14 | 15 => {
                let name = self.pick(&["expire", "pexpire", "expireat", "pexpireat"]);
                let time =
                    if self.of(8) == 0 { self.pick(&["0", "-5", "x"]).to_owned() } else { self.time(name) };
                let conditions = self.pick(&["", "", "nx", "xx", "gt", "lt", "xx lt"]);
                let conditions = conditions.split_whitespace().map(str::to_owned).collect();
                words(name, [vec![self.key(), time], conditions].concat())
            }
            16 | 17 => words(self.pick(&["ttl", "pttl"]), vec![self.key()]),
            18 => words(self.pick(&["echo", "ping"]), vec![self.value()]),
            _ => match self.of(4) {
                0 => words("get", vec![]),
                1 => words("mset", vec![self.key()]),
                2 => words("strlen", vec![self.key(), self.key()]),
                _ => words("ping", vec![]),
            },
        };
        if self.of(4) == 0 {
            command[0].make_ascii_uppercase();
        }
        command
    }
}

#[test]
fn every_command_answers_as_a_map_whose_keys_end() {
    Sim::seeds(50).faults(Faults::all()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        for client in 0..1 + (sim.random() % 5) as usize {
            sim.client(format!("c{client}"), async move |net| {
                let chance = Chance { net: &net, client };
                let mut me = Redis::connect(&net, addr).await?;
                let mut model = Model::default();
                for _ in 0..20 {
                    match chance.of(4) {
                        0 => net.sleep(Duration::from_secs(chance.of(400))).await,
                        1 => net.sleep(Duration::from_secs(chance.of(50 * 3600))).await,
                        _ => {}
                    }
                    while let Some(until) = model.pass(net.now().as_millis() as i64) {
                        net.sleep(Duration::from_millis(until as u64 + 1).saturating_sub(net.now())).await;
                    }
                    let sent = net.now();
                    let mut batch: Vec<Vec<String>> =
                        (0..1 + chance.of(12)).map(|_| chance.command()).collect();
                    let is_array = chance.of(2) == 0;
                    let requests: Vec<Vec<u8>> = batch
                        .iter()
                        .map(|words| if is_array { request(words) } else { line(words) })
                        .collect();
                    me.0.send(requests.concat()).await?;
                    let mut replies = Vec::new();
                    for _ in &batch {
                        replies.push(me.reply().await?);
                    }
                    let took = net.now() - sent;
                    assert!(took < Duration::from_millis(BATCH_MILLIS), "a batch took {took:?}");
                    let span = (sent.as_millis() as i64, net.now().as_millis() as i64);
                    for (words, reply) in batch.drain(..).zip(replies) {
                        model.check(&words, &reply, span);
                    }
                }
                me.check(&[("quit", "+OK")]).await?;
                assert_eq!(me.0.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}
