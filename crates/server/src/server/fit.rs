//! Limits that follow the memory of the process: at the start, and while the limit of its control
//! group changes.

use std::time::Duration;
use std::{io, thread};

use ringserve_base::clock::Deadline;
use ringserve_base::lines::{info, warn};
use ringserve_base::log_thread::hand_over;
use ringserve_base::machine::files::MachineFiles;
use ringserve_base::memory::{UsableMemory, available_memory, is_in_group, own_memory};
use ringserve_core::{Limits, ServerLimits};

use crate::error::Error;
use crate::shard::remote::control::ServerControl;

/// The interval at which a control group's limit is read.
const LOOKS_EVERY: Duration = Duration::from_millis(500);

/// The stack of the thread that reads it, with the frames of the program's log.
const STACK_BYTES: usize = 256 << 10;

/// Memory that a process needs in addition to its limits: code, stacks and rings.
const BESIDE_BYTES: u64 = 20 << 20;

/// The limits as the program and the defaults have them, and what follows from some memory.
pub(super) struct Fit {
    wanted: ServerLimits,
    /// The program set those of the server.
    is_given: bool,
    /// Limits of services, and whether the program set them.
    services: Vec<(Limits, bool)>,
    shards: usize,
    /// Limits of the program stay.
    keeps: bool,
    /// Memory that the machine had available at the start, which bounds defaults.
    available: Option<u64>,
    /// The limits on memory that the shards have.
    shown: Bounds,
}

/// `held_bytes_max` and `receive_bytes_max`.
type Bounds = (usize, usize);

fn bounds(limits: &ServerLimits) -> Bounds {
    (limits.held_bytes_max, limits.receive_bytes_max)
}

impl Fit {
    pub(super) fn new(
        wanted: &ServerLimits,
        is_given: bool,
        services: Vec<(Limits, bool)>,
        shards: usize,
    ) -> Fit {
        let (wanted, shown) = (wanted.clone(), bounds(wanted));
        Fit { wanted, is_given, services, shards, keeps: false, available: None, shown }
    }

    /// With limits of the program that stay as they are.
    pub(super) fn kept(self) -> Fit {
        Fit { keeps: true, ..self }
    }

    /// The limits of the server where its process has `own` bytes for itself.
    fn limits(&self, own: Option<u64>) -> ServerLimits {
        let own = own.filter(|_| !self.keeps || !self.is_given);
        let usable = own.into_iter().chain(self.available.filter(|_| !self.is_given)).min();
        let Some(usable) = usable else { return self.wanted.clone() };
        let fitted = self.wanted.clone().fitted(usable, self.shards);
        if self.is_given {
            let wanted = self.wanted.clone();
            if self.needs(&wanted) <= usable {
                return wanted;
            }
            return wanted.held_bytes_max(fitted.held_bytes_max).receive_bytes_max(fitted.receive_bytes_max);
        }
        let given = self.services.iter().filter(|(_, is_given)| *is_given);
        let raised = given.fold(fitted.clone(), |fitted, of| fitted.with_room_for(&of.0));
        let fits = own.is_none_or(|own| self.needs(&raised) <= own);
        if fits || self.keeps { raised } else { fitted }
    }

    /// Bytes that a process with such limits needs: what it counts as held takes up to a quarter
    /// more.
    fn needs(&self, limits: &ServerLimits) -> u64 {
        let (held, received) = (limits.held_bytes_max as u64, limits.receive_bytes_max as u64);
        let of_shard = held.saturating_add(held / 4).saturating_add(received);
        of_shard.saturating_mul(self.shards as u64).saturating_add(BESIDE_BYTES)
    }

    /// The least memory for which there are limits.
    fn least(&self) -> u64 {
        self.wanted.clone().fitted(0, self.shards).memory_bytes(self.shards)
    }

    /// Fits a service's limits into those of its server. True if the program's were lowered.
    fn lowers(&self, limits: &mut Limits, is_given: bool, server: &ServerLimits) -> bool {
        if is_given && (self.keeps || server.check_service(limits).is_ok()) {
            return false;
        }
        *limits = limits.clone().fitted(server);
        is_given
    }
}

/// Fits limits into the memory that the process may use, and says so. What the program set is
/// lowered only where its own memory has no room. Returns what the limits depend on, where that may
/// change.
///
/// # Errors
/// If even the least limits do not fit.
pub(super) fn fit(
    mut fit: Fit,
    server: &mut ServerLimits,
    services: &mut [&mut Limits],
) -> Result<Option<Fit>, Error> {
    let machine = MachineFiles::here();
    let (own, available) = (own_memory(&machine), available_memory(&machine));
    fit.available = available.as_ref().map(|memory| memory.bytes);
    if let Some(usable) = own.clone().filter(|own| !fit.keeps && fit.least() > own.bytes) {
        return Err(Error::Memory { shards: fit.shards, needed: fit.least(), usable });
    }
    let fitted = fit.limits(own.as_ref().map(|memory| memory.bytes));
    let mut lowered = fit.is_given && fitted != fit.wanted;
    for (limits, (_, is_given)) in services.iter_mut().zip(&fit.services) {
        lowered |= fit.lowers(limits, *is_given, &fitted);
    }
    if let Some(memory) = own.iter().chain(&available).min_by_key(|memory| memory.bytes) {
        tell(&fit, &fitted, services, memory);
    }
    if let Some(memory) = own.filter(|_| lowered) {
        warn!(
            "memory: the process may use {memory}, and limits of the program are lowered to that: held_bytes_max {} and \
             receive_bytes_max {} of each shard, where {} and {} are set; Server::fit_limits(false) keeps them",
            fitted.held_bytes_max,
            fitted.receive_bytes_max,
            fit.wanted.held_bytes_max,
            fit.wanted.receive_bytes_max
        );
    }
    fit.shown = bounds(&fitted);
    *server = fitted;
    Ok((!fit.keeps && is_in_group(&machine)).then_some(fit))
}

/// Says what follows from the memory that the process may use, and warns where the limits allow
/// more.
fn tell(fit: &Fit, fitted: &ServerLimits, services: &[&mut Limits], memory: &UsableMemory) {
    let (shards, most) = (fit.shards, fitted.memory_bytes(fit.shards));
    if most > memory.bytes {
        warn!(
            "the limits let {shards} shards hold {} MiB (receive_bytes_max and held_bytes_max of each), and the process may \
             use {memory}: lower them, or fit them by ServerLimits::fitted",
            most >> 20
        );
    }
    if fit.is_given {
        return;
    }
    if *fitted == fit.wanted {
        return info!("memory: the process may use {memory}; the default limits fit");
    }
    for limits in services {
        info!(
            "memory: the process may use {memory}; limits that follow from it: connections_max {}, receive_bytes_max {} \
             and held_bytes_max {} of each shard, outbox_bytes_max {}, frame_bytes_max {}",
            fitted.connections_max,
            fitted.receive_bytes_max,
            fitted.held_bytes_max,
            limits.outbox_bytes_max,
            limits.frame_bytes_max
        );
    }
}

/// Starts a thread by which the memory limits of a server's shards follow those of its control
/// groups. It ends, a moment late, with the server.
///
/// # Errors
/// If no thread can be started.
pub(super) fn follow(mut fit: Fit, control: &ServerControl) -> io::Result<()> {
    let control = control.clone();
    let looks = move || {
        let _handing = hand_over(None);
        let machine = MachineFiles::here();
        while Deadline::within(LOOKS_EVERY).pauses(LOOKS_EVERY) && control.has_shards() {
            let own = own_memory(&machine);
            let limits = fit.limits(own.as_ref().map(|memory| memory.bytes));
            let (held, received) = bounds(&limits);
            if fit.shown == (held, received) {
                continue;
            }
            let is_less = held < fit.shown.0 || received < fit.shown.1;
            fit.shown = (held, received);
            control.bound_memory(held, received);
            let memory = own.map_or_else(|| "all that there is".to_owned(), |memory| memory.to_string());
            let said = format!(
                "memory: the process may use {memory} now; held_bytes_max is {held} and receive_bytes_max {received} of each \
                 shard"
            );
            match is_less {
                true => warn!("{said}"),
                false => info!("{said}"),
            }
        }
    };
    thread::Builder::new().name("ringserve-memory".into()).stack_size(STACK_BYTES).spawn(looks).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn given(held: usize, received: usize) -> ServerLimits {
        ServerLimits::default().held_bytes_max(held * MIB).receive_bytes_max(received * MIB)
    }

    fn of(limits: &ServerLimits, is_given: bool, services: Vec<(Limits, bool)>) -> Fit {
        Fit { available: Some(100 << 20), ..Fit::new(limits, is_given, services, 2) }
    }

    #[test]
    fn limits_of_the_program_are_lowered_to_what_is_its_own() {
        let wanted = given(64, 16);
        let fit = of(&wanted, true, Vec::new());
        // Two shards: 2 x (80 + 16) + 20 MiB.
        for own in [None, Some(1 << 40), Some(212 << 20)] {
            assert_eq!(fit.limits(own), wanted, "{own:?}");
        }
        let lowered = fit.limits(Some(211 << 20));
        let fitted = wanted.clone().fitted(211 << 20, 2);
        assert_eq!(bounds(&lowered), bounds(&fitted));
        assert_eq!(lowered.connections_max, wanted.connections_max, "it is no memory");
        assert!(fit.needs(&lowered) < 211 << 20);
        assert_eq!(fit.kept().limits(Some(1 << 20)), wanted);
    }

    #[test]
    fn defaults_follow_what_is_available_too() {
        let wanted = ServerLimits::default();
        let fitted = |bytes| bounds(&wanted.clone().fitted(bytes, 2));
        let fit = of(&wanted, false, Vec::new());
        assert_eq!(bounds(&fit.limits(None)), fitted(100 << 20));
        assert_eq!(bounds(&fit.limits(Some(40 << 20))), fitted(40 << 20));
        assert_eq!(bounds(&fit.kept().limits(Some(40 << 20))), fitted(40 << 20), "the program set none");
    }

    #[test]
    fn service_that_may_hold_more_than_there_is_has_less() {
        let large = Limits::default().outbox_bytes_max(60 * MIB).frame_bytes_max(2 * MIB);
        let fit = of(&ServerLimits::default(), false, vec![(large.clone(), true)]);
        // There is room for it.
        let server = fit.limits(Some(300 << 20));
        assert_eq!(server.held_bytes_max, 60 * MIB);
        assert!(!fit.lowers(&mut large.clone(), true, &server));
        // There is none.
        let server = fit.limits(Some(100 << 20));
        let mut lowered = large.clone();
        assert!(fit.lowers(&mut lowered, true, &server));
        assert_eq!(server.check_service(&lowered), Ok(()));
        assert_eq!(lowered.outbox_bytes_max, server.held_bytes_max / 2);
        assert!(!fit.kept().lowers(&mut large.clone(), true, &server));
    }

    #[test]
    fn least_limits_are_those_of_no_memory() {
        let fit = of(&given(64, 16), true, Vec::new());
        assert_eq!(fit.least(), 2 * ((256 << 10) + 16 * (16 << 10)));
        assert_eq!(fit.limits(Some(1)).memory_bytes(2), fit.least());
    }
}
