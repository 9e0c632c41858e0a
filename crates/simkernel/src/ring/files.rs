//! The ring's file table, and the descriptors of the process.

use ringserve_core::ConnId;

/// The file table: direct descriptors by slot.
#[derive(Debug)]
pub struct Files<F> {
    /// Up to the highest slot that was used.
    files: Vec<Option<(ConnId, F)>>,
    slots: usize,
}

impl<F: Copy> Files<F> {
    pub(super) fn new(slots: usize) -> Files<F> {
        Files { files: Vec::new(), slots }
    }

    /// Puts a connection into its slot.
    pub fn install(&mut self, id: ConnId, file: F) {
        let slot = id.slot() as usize;
        assert!(slot < self.slots, "slot {slot} is beyond the file table");
        if slot >= self.files.len() {
            self.files.resize(slot + 1, None);
        }
        let old = self.files[slot].replace((id, file)).map(|(old, _)| old);
        assert!(old.is_none(), "slot {slot} is installed over {old:?}");
    }

    /// The entry of a connection. `None` if its slot is empty.
    pub fn get(&self, id: ConnId) -> Option<F> {
        let (holder, file) = self.at(id.slot())?;
        assert_eq!(holder, id, "operation for a connection whose slot is another's");
        Some(file)
    }

    /// Empties a connection's slot.
    pub fn take(&mut self, id: ConnId) -> Option<F> {
        let file = self.get(id)?;
        self.files[id.slot() as usize] = None;
        Some(file)
    }

    /// The connection in a slot.
    pub fn at(&self, slot: u32) -> Option<(ConnId, F)> {
        *self.files.get(slot as usize)?
    }

    /// All connections, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (ConnId, F)> {
        self.files.iter().copied().flatten()
    }
}

/// The descriptors of a process, from 3 on.
#[derive(Debug, Default)]
pub struct Descriptors<D>(Vec<Option<D>>);

impl<D: Copy> Descriptors<D> {
    /// Opens the lowest number that is free, so that numbers are reused at once.
    pub fn open(&mut self, of: D) -> i32 {
        let place = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        if place == self.0.len() {
            self.0.push(None);
        }
        self.0[place] = Some(of);
        place as i32 + 3
    }

    /// The file of an open descriptor.
    pub fn get(&self, fd: i32) -> D {
        let open = usize::try_from(fd - 3).ok().and_then(|place| *self.0.get(place)?);
        open.unwrap_or_else(|| panic!("descriptor {fd} is not open"))
    }

    /// Closes a descriptor, and returns its file.
    pub fn take(&mut self, fd: i32) -> D {
        let of = self.get(fd);
        self.0[fd as usize - 3] = None;
        of
    }

    /// Closes those of which this is true, and returns their files.
    pub fn take_if(&mut self, is_one: impl Fn(&D) -> bool) -> Vec<D> {
        self.0.iter_mut().filter_map(|place| place.take_if(|of| is_one(of))).collect()
    }

    /// The number of open files.
    pub fn count(&self) -> usize {
        self.0.iter().flatten().count()
    }
}
