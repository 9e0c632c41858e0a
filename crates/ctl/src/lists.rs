//! Lists, and orders.

use ringserve_report::{Connection, Connections, Stall};

use crate::args::ConnectionsOptions;
use crate::client::{Endpoint, Failure};
use crate::text::{bytes, plain, seconds, table};

/// Prints connections.
pub fn connections(endpoint: &Endpoint, options: &ConnectionsOptions, json: bool) -> Result<u8, Failure> {
    let path = format!("/connections?by={}&limit={}", options.by.as_str(), options.limit);
    if json {
        println!("{}", endpoint.get(&path)?.trim_end());
        return Ok(0);
    }
    let found: Connections = endpoint.get_json(&path)?;
    print!("{}", table_of(&found.connections));
    if !found.silent_shards.is_empty() {
        println!(
            "shards {:?} do not answer: a handler blocks them (ringserve-ctl stalls)",
            found.silent_shards
        );
    } else if !found.note.is_empty() {
        println!("{}", plain(&found.note));
    }
    Ok(0)
}

fn table_of(connections: &[Connection]) -> String {
    if connections.is_empty() {
        return "no such connections\n".to_owned();
    }
    let header = [
        "id",
        "peer",
        "service",
        "state",
        "outbox ",
        "received ",
        "sent ",
        "frames ",
        "age ",
        "idle ",
        "oldest call ",
    ];
    let row = |of: &Connection| {
        vec![
            plain(&of.id),
            plain(&of.peer),
            plain(&of.service),
            plain(&of.state),
            bytes(of.outbox_bytes),
            known(of.bytes_in, bytes),
            known(of.bytes_out, bytes),
            known(of.frames_in, |count| count.to_string()),
            seconds(of.age_seconds),
            seconds(of.idle_seconds),
            known(of.oldest_call_seconds, seconds),
        ]
    };
    fn known<T>(figure: Option<T>, text: impl FnOnce(T) -> String) -> String {
        figure.map_or_else(String::new, text)
    }
    table(&header, &connections.iter().map(row).collect::<Vec<_>>())
}

/// Prints stalls.
pub fn stalls(endpoint: &Endpoint, json: bool) -> Result<u8, Failure> {
    if json {
        println!("{}", endpoint.get("/stalls")?.trim_end());
        return Ok(0);
    }
    let stalls: Vec<Stall> = endpoint.get_json("/stalls")?;
    if stalls.is_empty() {
        println!("no stalls");
    }
    for stall in &stalls {
        println!("{}", line_of(stall));
    }
    Ok(0)
}

/// Formats `12 s ago  shard 0 stalled for 740 ms: call of 10.1.2.3:5511 (0.17.3, frame of 212
/// bytes), lock in futex_do_wait`.
pub fn line_of(stall: &Stall) -> String {
    let when = match stall.ongoing {
        true => "now".to_owned(),
        false => format!("{} ago", seconds(stall.ago_seconds)),
    };
    if !stall.text.is_empty() {
        return format!("{when:>12}  {}", plain(&stall.text));
    }
    let peer = stall.peer.as_ref().map(|peer| format!(" of {}", plain(peer))).unwrap_or_default();
    let mut details = Vec::new();
    details.extend(stall.connection.as_ref().map(|id| plain(id)));
    details.extend(stall.frame_bytes.map(|bytes| format!("frame of {bytes} bytes")));
    let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
    let waits = stall.waits_in.as_ref().map(|name| format!(" in {}", plain(name))).unwrap_or_default();
    let queue = match (stall.queue_waiting, stall.queue_lost) {
        (Some(waiting), Some(lost)) if waiting > 0 || lost > 0 => {
            format!("; {waiting} connections waited in its accept queue, {lost} lost so far")
        }
        _ => String::new(),
    };
    format!(
        "{when:>12}  shard {} stalled for {}: {}{peer}{details}, {}{waits}{queue}",
        stall.shard,
        seconds(stall.lasted_seconds),
        plain(&stall.work),
        plain(&stall.cause),
    )
}

/// Closes a connection.
pub fn close(endpoint: &Endpoint, id: &str) -> Result<u8, Failure> {
    let is_id = id.split('.').count() == 3 && id.chars().all(|c| c.is_ascii_digit() || c == '.');
    if !is_id {
        return Err(Failure(format!(
            "{id:?} is no connection: give one as `ringserve-ctl connections` shows it, like 0.17.3"
        )));
    }
    say(&endpoint.post(&format!("/connections/{id}/close"))?, &format!("{id} is told to close"));
    Ok(0)
}

/// Orders the server to shut down.
pub fn drain(endpoint: &Endpoint) -> Result<u8, Failure> {
    say(&endpoint.post("/drain")?, "the server drains");
    Ok(0)
}

/// Prints the answer, or `otherwise` if it is empty.
fn say(answer: &str, otherwise: &str) {
    let answer = plain(answer.trim());
    println!("{}", if answer.is_empty() { otherwise } else { &answer });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_is_one_line_with_all_that_is_known() {
        let stall = Stall {
            shard: 3,
            ago_seconds: 12.0,
            lasted_seconds: 0.74,
            work: "call".into(),
            peer: Some("10.1.2.3:5511".into()),
            connection: Some("3.17.2".into()),
            frame_bytes: Some(212),
            cause: "lock".into(),
            waits_in: Some("futex_do_wait".into()),
            queue_waiting: Some(311),
            queue_lost: Some(0),
            ..Stall::default()
        };
        assert_eq!(
            line_of(&stall).trim_start(),
            "12 s ago  shard 3 stalled for 740 ms: call of 10.1.2.3:5511 (3.17.2, frame of 212 bytes), lock in futex_do_wait; \
             311 connections waited in its accept queue, 0 lost so far"
        );
        let now = Stall { ongoing: true, work: "task".into(), cause: "cpu".into(), ..Stall::default() };
        assert_eq!(line_of(&now).trim_start(), "now  shard 0 stalled for 0: task, cpu");
        let said = Stall { text: "shard 1 stalled\u{7}".into(), ..now };
        assert_eq!(line_of(&said).trim_start(), "now  shard 1 stalled?");
    }
}
