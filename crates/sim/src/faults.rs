//! Faults, the rate of each in a seed, and how often each occurred.

use crate::rng::Rng;
use ringserve_core::internals::CLOSE_REASONS;

macro_rules! named {
    ($(#[$doc:meta])* $kind:ident { $($name:ident $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum $kind { $(#[doc = $text] $name,)* }

        impl $kind {
            /// Their names, in order.
            pub const NAMES: &[&str] = &[$($text),*];
            /// Their number.
            pub const COUNT: usize = Self::NAMES.len();
        }
    };
}

named! {
    /// A fault. Those up to `Stall` have a rate that each seed draws; the others belong to a peer's
    /// or a handler's script.
    Fault {
        Delay "completion held back while others go ahead",
        CancelLate "answer to a cancel comes turns later",
        CloseLate "close or shutdown completes turns later",
        ReceiveShort "receive takes less than is there",
        ReceiveEnds "receive ends with a successful completion",
        ReceiveInterrupted "receive ends with EINTR",
        ReceiveCanceled "receive ends with ECANCELED, uncalled for",
        ReceiveLies "... with F_MORE set",
        ReceiveBroken "receive fails with another error",
        ReceiveSilent "receive ends without a completion",
        ResetUnheard "reset together with data is not reported",
        BytesUnheard "bytes that wait behind others are not reported",
        ProbeFails "probe fails though the connection does not",
        ProbeRace "peer ends while the receive is looked at",
        InputEndUnheard "receive does not notice that its input was shut down",
        BufferInError "error or end of stream carries a buffer",
        NoBufferLie "ENOBUFS though a buffer is there",
        NoBufferEarly "ENOBUFS on an empty ring, nothing to read",
        CancelLies "ECANCELED after a cancel, with F_MORE set",
        CancelRace "bytes arrive while the receive is cancelled",
        CancelAlready "cancel answers EALREADY",
        ReceiveMissed "cancel does not find a receive that lives",
        SendMissed "cancel does not find a send that lives",
        AcceptMissed "cancel does not find an accept that lives",
        ConnectMissed "cancel does not find a connect that lives",
        SendShort "send takes less than fits",
        SendInterrupted "send ends with EINTR",
        SendNoBuffers "send ends with ENOBUFS",
        SendAgain "send ends with EAGAIN though there is room",
        SendBroken "send fails with another error",
        AcceptEnds "accept ends with a successful completion",
        AcceptNoDescriptor "accept ends with EMFILE",
        AcceptNoFile "accept ends with ENFILE",
        AcceptAborted "accept ends with ECONNABORTED",
        AcceptInterrupted "accept ends with EINTR",
        AcceptLies "accept ends with ECANCELED and F_MORE",
        AcceptBroken "accept ends with another error",
        NewcomersLate "connections come though newcomers are turned away",
        TakeNoDescriptor "no descriptor for a queued connection",
        TakeAborted "queued connection is gone when it is taken",
        PeerUnknown "getpeername fails",
        SocketFails "no socket for an upstream",
        ConnectRefused "upstream refuses",
        ConnectUnanswered "upstream never answers",
        InstallFails "file table refuses a socket",
        ShutdownFails "shutdown fails",
        EnterInterrupted "enter ends with EINTR",
        EnterBusy "enter ends with EBUSY",
        EnterAgain "enter ends with EAGAIN, nothing submitted",
        EnterNoMemory "enter ends with ENOMEM, nothing submitted",
        EnterPartial "enter submits a part",
        Stall "process stopped for a while",
        QueueTaken "connection taken from a queue that is emptied",
        QueueLeft "queue of an adopted listener left to its next owner",
        WokenForOne "cancelled accept was woken for a connection",
        SendDeferred "turn whose sends are not waited for",
        CancelsMeet "answer to an old cancel meets a new one",
        QueueFull "submission queue full",
        Overflow "completion queue overflows",
        Reuse "slot used again",
        UpstreamFull "no slot for an upstream",
        UpstreamGivenUp "service gives up a connect",
        PeerResets "peer resets",
        PeerHalfCloses "peer half-closes at once",
        PeerMidFrame "peer closes in the middle of a frame",
        PeerTrickles "peer sends a few bytes at a time",
        PeerNeverReads "peer never reads",
        PeerStalls "peer stops reading for a time",
        PeerSipsBytes "peer reads a few bytes at a time",
        PeerGarbage "peer breaks the framing",
        PeerSilent "peer sends nothing",
        PeerIdles "peer stays after its last reply",
        PeerIgnoresEnd "peer ignores the server's FIN",
        PeerCrawls "peer goes on with half a frame next to never",
        PeerDawdles "peer takes its time between frames",
        PeerAnswers "peer answers a heartbeat",
        PeerMute "peer leaves a heartbeat unanswered",
        PeerGoneEarly "peer resets before it is accepted",
        HandlerParks "handler parks",
        TurnFull "turn has no room for a call",
        HandlerOverlaps "handler parks beside another of its connection",
        HandlerOvertakes "parked handler is done before an older one",
        HandlerLingers "handler parks for seconds",
        HandlersDropped "several parked handlers are dropped at once",
        HandlerHolds "handler keeps frames",
        HandlerFails "handler fails",
        HandlerPanics "handler panics",
        HandlerCloses "handler closes",
        HandlerAborts "handler aborts",
        HandlerStreams "handler streams and waits for room",
        HandlerUnframed "reply cannot be framed",
        HandlerEndsWriting "handler ends its side of the stream",
        EncodePanics "framing panics while it encodes a frame",
        PushElsewhere "push to another connection",
        PushAnnounced "push from another thread",
        PushFull "push from another thread finds the outbox full",
        PushGone "push from another thread finds the connection gone",
        PushTooLate "push from another thread, and its connection ended on the way",
        PagePushes "push from a page",
        PageFull "page has no room for all that its source wants",
        HeldOpen "connection held open",
        InputEndTold "connection is still held open when its peer ends",
        HeldClosed "service closes what it held open",
        HeldForgotten "service never closes what it held open",
        HeartbeatAsked "heartbeat asks",
        HeartbeatUnsaid "heartbeat, and the service says nothing",
        PassedOn "socket passed on to another shard",
        PassedBack "socket passed back by another shard",
        PassedAway "socket passed on and lost on the way",
        PassedTaken "another shard takes a socket",
        PassedRefused "another shard refuses a socket",
        PassedAtTheEnd "socket passed back to a shard that drains",
        QuotaUsedUp "server is full, this shard is not",
        OpenRefuses "open refuses",
        AdmitRefuses "admit refuses",
        OpenGreets "open greets",
        DeadlineSet "deadline set, or begun again",
        DeadlineLeft "other limits set beside a deadline",
        DeadlineTaken "deadline taken away",
        OpenWaits "open waits",
        OpenDropped "open that waits is dropped",
        OldName "call with the name of a connection that is gone",
        Drained "drain with connections alive",
        DrainDelayed "drain that goes on as before for a time",
        DrainCuts "connection cut by a drain while something is owed",
        AdmittedLate "connection admitted by a shard that drains",
        AbortedAll "abort with connections alive",
        LeftBehind "completion that never comes after an abort",
        ClockLate "shard that has run for months or years",
        QuietTime "hours or months pass without a connection",
        RingRenewed "buffer ring replaced by a quiet shard",
        RenewRefused "kernel refuses another buffer ring",
        Lent "frame lent to a send",
        CallsHeldBack "no more calls of a connection since memory is tight",
        HeavyGoes "connection that holds much ends since memory is tight",
        NewestGoes "heaviest connection ends though it has not held that for long, since little else is held",
        LightGoes "connection that holds little ends since memory is tight",
        Dry "pool empty while receives wait",
    }
}

named! {
    /// A completion that the driver reaped, one entry for each path of its code.
    Arm {
        ReceivedMore "receive: bytes, goes on",
        ReceivedLast "receive: bytes, ended",
        ReceivedLastStopped "receive: bytes, ended, cancelled",
        BufferInError "receive: error or end with a buffer",
        ReceiveEof "receive: end of stream",
        ReceiveEofStopped "receive: end of stream, cancelled",
        ReceiveDry "receive: ENOBUFS",
        ReceiveDryStopped "receive: ENOBUFS, cancelled",
        ReceiveCanceled "receive: ECANCELED",
        ReceiveCanceledMore "receive: ECANCELED with F_MORE",
        ReceiveCanceledStopped "receive: ECANCELED, cancelled",
        ReceiveCanceledMoreStopped "receive: ECANCELED with F_MORE, cancelled",
        ReceiveInterrupted "receive: EINTR",
        ReceiveInterruptedStopped "receive: EINTR, cancelled",
        ReceiveReset "receive: ECONNRESET and kin",
        ReceiveError "receive: other errors",
        ReceiveErrorStopped "receive: errors, cancelled",
        ReceiveNoSocket "receive: EBADF",
        ReceivedOnce "receive for once: bytes",
        Filled "receive into a block: bytes, all that may come",
        FilledPart "receive into a block: bytes, fewer",
        FilledStopped "receive into a block: bytes, cancelled",
        FillEnded "receive into a block: none, ended or failed",
        FillEndedStopped "receive into a block: none, cancelled",
        ProbedNothing "probe: EAGAIN",
        ProbedBytes "probe: bytes",
        ProbedEnd "probe: end of stream",
        ProbedError "probe: errors",
        ProbeFailed "probe: EINTR and kin",
        SentAll "send: all, at once",
        SentQuietly "send: all, told later",
        SentPart "send: a part, at once",
        SendFull "send: EAGAIN",
        SendInterrupted "send: EINTR",
        SendNoBuffers "send: ENOBUFS",
        SendError "send: errors",
        SentRest "send: the rest, all",
        SentRestPart "send: the rest, a part",
        SendStoppedPart "send: cancelled, a part left",
        SendStoppedNone "send: ECANCELED",
        SendStoppedAll "send: cancelled too late",
        AcceptedMore "accept: socket, goes on",
        AcceptedLast "accept: socket, ended",
        AcceptNoDescriptor "accept: EMFILE",
        AcceptNoFile "accept: ENFILE",
        AcceptAborted "accept: ECONNABORTED",
        AcceptInterrupted "accept: EINTR",
        AcceptCanceled "accept: ECANCELED",
        AcceptCanceledMore "accept: ECANCELED with F_MORE",
        AcceptError "accept: other errors",
        CancelReceiveDone "cancel of a receive: 0",
        CancelReceiveNone "cancel of a receive: ENOENT",
        CancelReceiveAlready "cancel of a receive: EALREADY",
        CancelReceiveStale "cancel of a receive: for a connection that is gone",
        CancelSendDone "cancel of a send: 0",
        CancelSendNone "cancel of a send: ENOENT",
        CancelSendAlready "cancel of a send: EALREADY",
        CancelAcceptDone "cancel of an accept: 0",
        CancelAcceptNone "cancel of an accept: ENOENT",
        CancelAcceptAlready "cancel of an accept: EALREADY",
        Shutdown "shutdown: done",
        ShutdownError "shutdown: error",
        ShutdownInput "shutdown of the input: done",
        CloseOrderly "close: FIN",
        CloseAbort "close: RST",
        CloseUnread "close: FIN asked, input left unread",
        CloseError "close: error",
        InstallError "install: error",
        Connected "connect: done",
        ConnectCanceled "connect: ECANCELED",
        ConnectError "connect: errors",
        CancelConnectDone "cancel of a connect: 0",
        CancelConnectNone "cancel of a connect: ENOENT",
        CancelConnectAlready "cancel of a connect: EALREADY",
        Wake "wake-up",
        Timeout "enter: ETIME",
        CameTogether "enter that waits for more: something came",
        MoreTimeout "enter that waits for more: ETIME",
    }
}

/// Faults whose rate a seed draws.
const DRAWN: usize = Fault::Stall as usize + 1;

/// The rate of each fault, in 65536.
#[derive(Clone, Debug)]
pub struct Rates([u16; DRAWN]);

impl Rates {
    /// Draws rates: some faults are off, some rare, some frequent. One seed in sixteen has none at
    /// all.
    pub fn draw(rng: &mut Rng) -> Rates {
        let mut rates = [0; DRAWN];
        if !rng.one_in(16) {
            // The number of faults that are off differs from seed to seed.
            let on = rng.range(1, 6);
            for rate in &mut rates {
                if rng.below(8) < on {
                    *rate = rng.spread(64, 16_000) as u16;
                }
            }
            // These break a connection, so they are kept rare; too many would hide everything else.
            use Fault::*;
            for fault in [ReceiveBroken, SendBroken, ReceiveSilent, Stall] {
                rates[fault as usize] /= 24;
            }
            rates[InstallFails as usize] /= 12;
            // These have few occasions.
            for fault in
                [NewcomersLate, TakeNoDescriptor, TakeAborted, AcceptMissed, ConnectMissed, EnterBusy]
            {
                rates[fault as usize] = rates[fault as usize].saturating_mul(4);
            }
            // A ring that is almost never entered keeps no time limit.
            rates[EnterBusy as usize] = rates[EnterBusy as usize].min(40_000);
            for fault in [ReceiveMissed, SendMissed] {
                rates[fault as usize] = rates[fault as usize].saturating_mul(8);
            }
            for fault in [
                CancelRace,
                CancelLate,
                CancelLies,
                CancelAlready,
                NoBufferEarly,
                ShutdownFails,
                ResetUnheard,
            ] {
                rates[fault as usize] = rates[fault as usize].saturating_mul(8);
            }
            // There are few cancels of receives, and few probes.
            for fault in [CancelRace, CancelLate] {
                rates[fault as usize] = rates[fault as usize].saturating_mul(64);
            }
            rates[ProbeFails as usize] = rates[ProbeFails as usize].saturating_mul(16);
            // A probe finds more than that nothing came only if the peer ends just then.
            rates[ProbeRace as usize] = rates[ProbeRace as usize].saturating_mul(32).max(16_384);
            // Most connections that miss a reset learn of it from a send soon after.
            rates[ResetUnheard as usize] = rates[ResetUnheard as usize].saturating_mul(16);
        }
        Rates(rates)
    }

    /// The rate of a fault up to `Stall`.
    #[inline]
    pub fn of(&self, fault: Fault) -> u16 {
        self.0[fault as usize]
    }
}

/// Counts of all events.
#[derive(Clone, Debug)]
pub struct Coverage {
    faults: [u64; Fault::COUNT],
    arms: [u64; Arm::COUNT],
    reasons: [u64; CLOSE_REASONS.len()],
    /// Turns taken.
    pub turns: u64,
    /// Connections opened.
    pub connections: u64,
    /// Frames passed to the service.
    pub frames: u64,
}

impl Default for Coverage {
    fn default() -> Coverage {
        Coverage {
            faults: [0; Fault::COUNT],
            arms: [0; Arm::COUNT],
            reasons: [0; CLOSE_REASONS.len()],
            turns: 0,
            connections: 0,
            frames: 0,
        }
    }
}

impl Coverage {
    /// Counts a fault.
    #[inline]
    pub fn fault(&mut self, fault: Fault) {
        self.faults[fault as usize] += 1;
    }

    /// Counts a completion that the driver reaped.
    #[inline]
    pub fn arm(&mut self, arm: Arm) {
        self.arms[arm as usize] += 1;
    }

    /// Adds the counts of a shard.
    pub fn shard(&mut self, counters: &ringserve_core::ConnStats) {
        for (reason, more) in counters.reasons() {
            let index = CLOSE_REASONS.iter().position(|name| *name == reason);
            self.reasons[index.expect("a reason has one of the names")] += more;
        }
        self.connections += counters.opened;
        self.frames += counters.frames;
    }

    /// Adds the counts of another seed.
    pub fn add(&mut self, other: &Coverage) {
        let sums = self.faults.iter_mut().chain(&mut self.arms).chain(&mut self.reasons);
        let more = other.faults.iter().chain(&other.arms).chain(&other.reasons);
        for (sum, more) in sums.zip(more) {
            *sum += more;
        }
        self.turns += other.turns;
        self.connections += other.connections;
        self.frames += other.frames;
    }

    /// All counts, each with its name.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, String, u64)> + '_ {
        let faults = Fault::NAMES.iter().zip(self.faults).map(|(name, n)| ("fault", name.to_string(), n));
        let arms = Arm::NAMES.iter().zip(self.arms).map(|(name, n)| ("arm", name.to_string(), n));
        // Listeners of proxies and of transports are only in whole servers.
        let for_others =
            |name: &str| ["proxy_", "handshake_", "tls_", "upgrade_"].iter().any(|of| name.starts_with(of));
        let reasons = CLOSE_REASONS.iter().zip(self.reasons).filter(move |(name, _)| !for_others(name));
        let reasons = reasons.map(|(name, n)| ("reason", name.to_string(), n));
        faults.chain(arms).chain(reasons)
    }
}

/// An intentional bug, for a run that must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Canary {
    /// One received byte is replaced.
    Byte,
    /// One provided buffer is lost.
    Buffer,
}
