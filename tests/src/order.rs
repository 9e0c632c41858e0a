//! Orders for a [`Puppet`](crate::Puppet): a frame for each, made by a function.
//!
//! On the wire the first byte selects the order, and the rest is its argument.

macro_rules! orders {
    ($($order:ident = $byte:literal,)*) => {
        /// The first byte of a frame.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Order {
            $($order = $byte,)*
        }

        impl Order {
            /// Splits a frame into the order and its argument. A frame without bytes is sent back.
            pub fn of(frame: &[u8]) -> (Order, &[u8]) {
                let Some((byte, argument)) = frame.split_first() else { return (Order::Echo, frame) };
                let order = match byte {
                    $($byte => Order::$order,)*
                    byte => panic!("no order begins with {byte}"),
                };
                (order, argument)
            }
        }
    };
}

orders! {
    Echo = b'e',
    Reply = b'b',
    Replies = b'r',
    Stream = b's',
    Gate = b'p',
    ThreadWakes = b't',
    WakesItself = b'w',
    Keep = b'k',
    Close = b'c',
    Abort = b'a',
    Fail = b'f',
    FailLate = b'F',
    Panic = b'x',
    PanicLate = b'X',
    FailWithPanic = b'z',
    PanicInDrop = b'd',
    WaitWithPanic = b'D',
    Name = b'h',
    PushTo = b'>',
    CloseNamed = b'!',
    IsGone = b'?',
    Sleep = b'S',
    InTime = b'=',
    TimeOut = b'L',
    Door = b'g',
    ReplyThenGate = b'B',
    HoldOpen = b'o',
    Reach = b'H',
    PushThrough = b'@',
    Draining = b'q',
    Shard = b'i',
    Block = b'|',
}

/// An order on a server of lines.
pub fn line(order: Vec<u8>) -> Vec<u8> {
    [&order[..], b"\n"].concat()
}

fn order(order: Order, argument: impl AsRef<[u8]>) -> Vec<u8> {
    [&[order as u8], argument.as_ref()].concat()
}

/// Argument of an order of two parts.
fn two(first: impl AsRef<[u8]>, cut: &str, second: impl AsRef<[u8]>) -> Vec<u8> {
    [first.as_ref(), cut.as_ref(), second.as_ref()].concat()
}

/// Sends the frame back.
pub fn echo(text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Echo, text)
}

/// An [`echo`] whose frame has `bytes` bytes, 1 or more.
pub fn echo_of(bytes: usize) -> Vec<u8> {
    echo(vec![b'e'; bytes - 1])
}

/// A reply of `bytes` bytes of the [`pattern`](crate::pattern).
pub fn reply(bytes: usize) -> Vec<u8> {
    order(Order::Reply, bytes.to_string())
}

/// `count` replies of `bytes` bytes each, without waiting.
pub fn replies(count: usize, bytes: usize) -> Vec<u8> {
    order(Order::Replies, format!("{count},{bytes}"))
}

/// Streams `bytes` bytes of the pattern, unframed, waiting for room between pieces.
pub fn stream(bytes: usize) -> Vec<u8> {
    order(Order::Stream, bytes.to_string())
}

/// Waits for the gate; then sends the frame back.
pub fn gate(text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Gate, text)
}

/// Starts a thread that wakes the call; then sends the frame back.
pub fn thread_wakes(text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::ThreadWakes, text)
}

/// Makes the call wake itself and end at once; sends the frame back.
pub fn wakes_itself(text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::WakesItself, text)
}

/// Keeps the frame in the session until that ends; the reply is its length.
pub fn keep(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Keep, bytes)
}

/// Replies `bye` and closes.
pub fn close() -> Vec<u8> {
    order(Order::Close, "")
}

/// Resets the connection.
pub fn abort() -> Vec<u8> {
    order(Order::Abort, "")
}

/// Fails the call at once.
pub fn fail() -> Vec<u8> {
    order(Order::Fail, "")
}

/// Fails the call after the gate.
pub fn fail_late() -> Vec<u8> {
    order(Order::FailLate, "")
}

/// Panics in the call at once.
pub fn panics() -> Vec<u8> {
    order(Order::Panic, "")
}

/// Panics in the call after the gate.
pub fn panic_late() -> Vec<u8> {
    order(Order::PanicLate, "")
}

/// Fails the call after the gate with an error whose drop panics.
pub fn fail_with_panic() -> Vec<u8> {
    order(Order::FailWithPanic, "")
}

/// Makes the session's drop panic; replies `armed`.
pub fn panic_in_drop() -> Vec<u8> {
    order(Order::PanicInDrop, "")
}

/// Waits without end, with something whose drop panics.
pub fn wait_with_panic() -> Vec<u8> {
    order(Order::WaitWithPanic, "")
}

/// Names the connection on its shard; replies `named`.
pub fn name(name: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Name, name)
}

/// Pushes text to the connection of that name; replies `ok`, `full` or `gone`.
pub fn push_to(name: impl AsRef<[u8]>, text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::PushTo, two(name, ":", text))
}

/// Closes the connection of that name; replies `closed`.
pub fn close_named(name: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::CloseNamed, name)
}

/// Replies `gone` or `lives` for the connection of that name.
pub fn is_gone(name: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::IsGone, name)
}

/// Sleeps for that many milliseconds; then sends the frame back.
pub fn sleep(milliseconds: u64) -> Vec<u8> {
    order(Order::Sleep, milliseconds.to_string())
}

/// Does [`sleep`] in a frame that differs from others by `text`.
pub fn sleep_and(milliseconds: u64, text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Sleep, two(milliseconds.to_string(), ",", text))
}

/// Sends the frame back within a time limit that it does not need.
pub fn in_time(text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::InTime, text)
}

/// Waits without end within a time limit of that many milliseconds; replies `elapsed`.
pub fn time_out(milliseconds: u64) -> Vec<u8> {
    order(Order::TimeOut, milliseconds.to_string())
}

/// Waits until the test opens the door of that name; then sends the frame back.
pub fn door(name: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Door, name)
}

/// A reply of `bytes` bytes; then waits for the gate.
pub fn reply_then_gate(bytes: usize) -> Vec<u8> {
    order(Order::ReplyThenGate, bytes.to_string())
}

/// Holds the connection open; replies `held`.
pub fn hold_open() -> Vec<u8> {
    order(Order::HoldOpen, "")
}

/// Gives the test a handle by that name; replies `reached`.
pub fn reach(name: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::Reach, name)
}

/// Pushes text through the handle of that name, from whichever shard this is; replies like
/// [`push_to`].
pub fn push_through(name: impl AsRef<[u8]>, text: impl AsRef<[u8]>) -> Vec<u8> {
    order(Order::PushThrough, two(name, ":", text))
}

/// Replies `serving`, or `draining` once the server was ordered to shut down.
pub fn draining() -> Vec<u8> {
    order(Order::Draining, "")
}

/// Replies with the shard's number.
pub fn shard() -> Vec<u8> {
    order(Order::Shard, "")
}

/// Blocks the shard's thread until the test releases it; then sends the frame back.
pub fn block() -> Vec<u8> {
    order(Order::Block, "")
}
