//! Values under numbers that are given again.

/// A table of values, each under a number for as long as it is there.
pub(crate) struct Slab<T> {
    all: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { all: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn add(&mut self, value: T) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() as u32 - 1
        });
        self.all[number as usize] = Some(value);
        number
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        let value = self.all.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(value)
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.all.get(number as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.all.get_mut(number as usize)?.as_mut()
    }

    /// The number of values.
    pub(crate) fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// The numbers that were ever given are below this one.
    pub(crate) fn end(&self) -> u32 {
        self.all.len() as u32
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.all.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.iter_mut().flatten()
    }
}
