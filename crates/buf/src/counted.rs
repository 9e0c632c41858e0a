//! A counted allocation of a head and a body whose type its holders may forget.
//!
//! A shard's table holds connections of several services, each with its own type of session.
//! `Rc<dyn Any>` costs each holder a second word, and a box around the session costs each
//! connection a second allocation. Here the body's type is stored once, after the counts, and a
//! holder is one thin pointer.
//!
//! ```text
//!   Counted<H, B>   ─┐      ┌────────┬──────┬──────┬────────┬────────┐
//!   CountedHead<H>  ─┼────▶ │ strong │ weak │ kind │ head H │ body B │
//!   WeakHead<H>     ─┘      └────────┴──────┴──────┴────────┴────────┘
//! ```
//!
//! A block may be created before its body. Until then it has another kind, of which no type is the
//! body's: so nothing finds a body in it, and only its head is dropped. [`CountedHead::fill`]
//! writes the body and replaces the kind.

use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::any::TypeId;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::{self, NonNull};

/// The type of a block: how it is dropped and freed without its body's type.
struct Kind {
    /// The type of the body.
    type_id: fn() -> TypeId,
    /// The layout of the block.
    layout: Layout,
    /// Drops head and body of a block of this kind.
    drop: unsafe fn(NonNull<Counts>),
}

/// The start of each block.
struct Counts {
    strong: Cell<u32>,
    /// Weak holders, and one for all strong ones together.
    weak: Cell<u32>,
    /// Replaced at most once, by [`CountedHead::fill`], by one of the same layout.
    kind: Cell<&'static Kind>,
}

/// The start of each block whose head is an `H`.
#[repr(C)]
struct BlockHead<H> {
    counts: Counts,
    head: H,
}

#[repr(C)]
struct Block<H, B> {
    headed: BlockHead<H>,
    body: B,
}

/// Represents the body of a block that has none yet. No code outside this file can name it.
struct EmptyBody<B>(PhantomData<B>);

impl<H: 'static, B: 'static> Block<H, B> {
    const KIND: &'static Kind =
        &Kind { type_id: TypeId::of::<B>, layout: Layout::new::<Block<H, B>>(), drop: Self::drop_contents };

    /// The kind of a block without its body.
    const UNFILLED: &'static Kind = &Kind {
        type_id: TypeId::of::<EmptyBody<B>>,
        layout: Layout::new::<Block<H, B>>(),
        drop: Self::drop_head,
    };

    /// Allocates memory for a block of `kind`, whose counts and head are written and whose body is
    /// not. `None` if the system has none; then the head is dropped.
    fn try_allocate(head: H, kind: &'static Kind) -> Option<NonNull<Block<H, B>>> {
        // SAFETY: the layout is not empty, since a block begins with its counts.
        let memory = unsafe { alloc(Layout::new::<Block<H, B>>()) };
        let block = NonNull::new(memory.cast::<Block<H, B>>())?;
        let counts = Counts { strong: Cell::new(1), weak: Cell::new(1), kind: Cell::new(kind) };
        // SAFETY: the memory was just allocated with the layout of this type, and belongs to this
        // function alone. What is headed is the first field of a block, which is `repr(C)`.
        unsafe { block.cast::<BlockHead<H>>().write(BlockHead { counts, head }) };
        Some(block)
    }

    /// # Safety
    /// `counts` is the start of a block of this type whose body is not there, and whose head
    /// nothing uses from now on.
    unsafe fn drop_head(counts: NonNull<Counts>) {
        let block = counts.cast::<Block<H, B>>().as_ptr();
        // SAFETY: the caller's promise, and the addresses are the same as in `drop_contents`.
        let head = unsafe { &raw mut (*block).headed.head };
        // SAFETY: the caller's promise.
        unsafe { ptr::drop_in_place(head) }
    }

    /// # Safety
    /// `counts` is the start of a block of this type, whose head and body nothing uses from now on.
    unsafe fn drop_contents(counts: NonNull<Counts>) {
        let block = counts.cast::<Block<H, B>>().as_ptr();
        // SAFETY: the caller's promise. The counts are the first field of the first field of a
        // block, both `repr(C)`, so they have its address, and the pointer was made from the whole
        // allocation.
        let body = unsafe { &raw mut (*block).body };
        // SAFETY: as above.
        let head = unsafe { &raw mut (*block).headed.head };
        // Head and body are dropped separately, since weak holders that the destructors meet read
        // the counts.
        let body = DropLater(body);
        // SAFETY: the caller's promise.
        unsafe { ptr::drop_in_place(head) }
        drop(body);
    }
}

/// Drops a value in place at the end of its scope, also if that ends by a panic.
struct DropLater<B>(*mut B);

impl<B> Drop for DropLater<B> {
    fn drop(&mut self) {
        // SAFETY: made by `drop_contents` alone, for a body that nothing else drops or uses.
        unsafe { ptr::drop_in_place(self.0) }
    }
}

/// A counted pointer, like `Rc`, to a head followed by a body, in one allocation. It derefs to the
/// head.
///
/// ```
/// use ringserve_buf::Counted;
///
/// let named = Counted::try_new("seven", 7).unwrap();
/// let hidden = named.clone().hide();
/// assert_eq!((hidden.len(), *named.body()), (5, 7));
/// assert_eq!(hidden.downcast_ref::<i32>().map(Counted::body), Some(&7));
/// assert!(hidden.downcast_ref::<u8>().is_none());
/// ```
#[repr(transparent)]
pub struct Counted<H, B> {
    head: CountedHead<H>,
    body: PhantomData<B>,
}

/// A [`Counted`] whose body's type was forgotten.
#[repr(transparent)]
pub struct CountedHead<H> {
    /// A pointer to a whole [`Block`].
    block: NonNull<BlockHead<H>>,
}

/// Keeps the memory of a [`Counted`] from being freed, but neither head nor body from being
/// dropped.
pub struct WeakHead<H> {
    block: NonNull<BlockHead<H>>,
}

impl<H: 'static, B: 'static> Counted<H, B> {
    /// Moves both into a new block: 16 bytes more than their size. `None` if the system has no
    /// memory for it; then both are dropped.
    pub fn try_new(head: H, body: B) -> Option<Counted<H, B>> {
        let block = Block::<H, B>::try_allocate(head, Block::<H, B>::KIND)?;
        // SAFETY: the block was just allocated for a body of this type.
        let place = unsafe { &raw mut (*block.as_ptr()).body };
        // SAFETY: there is no body yet, and the block belongs to this function alone.
        unsafe { place.write(body) };
        Some(Counted { head: CountedHead { block: block.cast() }, body: PhantomData })
    }

    /// Moves `head` into a new block with room for a body, which [`fill`](CountedHead::fill) moves
    /// there later. Until then its body has no type. `None` if the system has no memory for it;
    /// then `head` is dropped.
    ///
    /// ```
    /// use ringserve_buf::Counted;
    ///
    /// let unfilled = Counted::<_, String>::try_new_unfilled(7).unwrap();
    /// assert!(unfilled.downcast_ref::<String>().is_none());
    /// assert_eq!(unfilled.fill("seven").err(), Some("seven"), "its body is to be a `String`");
    /// assert_eq!(unfilled.fill("seven".to_string()).unwrap().body(), "seven");
    /// ```
    pub fn try_new_unfilled(head: H) -> Option<CountedHead<H>> {
        let block = Block::<H, B>::try_allocate(head, Block::<H, B>::UNFILLED)?;
        Some(CountedHead { block: block.cast() })
    }

    /// The body.
    #[inline]
    pub fn body(&self) -> &B {
        let block: NonNull<Block<H, B>> = self.head.block.cast();
        // SAFETY: this is a strong holder, which keeps the body alive. Its block has a body of type
        // `B`: it was made by `try_new` with that type, or comes from a head by `downcast`,
        // `downcast_ref` or `fill`, which checked it. The pointer was made from the whole
        // allocation.
        unsafe { &(*block.as_ptr()).body }
    }

    /// The same holder without the body's type.
    #[inline]
    pub fn hide(self) -> CountedHead<H> {
        self.head
    }
}

impl<H, B> Counted<H, B> {
    /// The same block without its body's type.
    #[inline]
    pub fn head(&self) -> &CountedHead<H> {
        &self.head
    }
}

impl<H: 'static> CountedHead<H> {
    /// The block with its body, if that is of type `B`.
    #[inline]
    pub fn downcast_ref<B: 'static>(&self) -> Option<&Counted<H, B>> {
        let kind = self.counts().kind.get();
        // Kinds are equal in address only if they are in content, and each type's function returns
        // another identifier. Kinds of one type may have several addresses.
        if !ptr::eq(kind, Block::<H, B>::KIND) && (kind.type_id)() != TypeId::of::<B>() {
            return None;
        }
        // SAFETY: a `Counted` is nothing but a head, which `repr(transparent)` promises, and the
        // block has such a body.
        Some(unsafe { &*ptr::from_ref(self).cast::<Counted<H, B>>() })
    }

    /// The same holder, if the block has a body of type `B`.
    ///
    /// # Errors
    /// The holder, if it has not.
    pub fn downcast<B: 'static>(self) -> Result<Counted<H, B>, CountedHead<H>> {
        match self.downcast_ref::<B>().is_some() {
            true => Ok(Counted { head: self, body: PhantomData }),
            false => Err(self),
        }
    }

    /// Moves the body into a block that was made [without](Counted::try_new_unfilled) it.
    ///
    /// # Errors
    /// The body, if the block has one, or is meant for one of another type.
    pub fn fill<B: 'static>(&self, body: B) -> Result<&Counted<H, B>, B> {
        let counts = self.counts();
        if (counts.kind.get().type_id)() != TypeId::of::<EmptyBody<B>>() {
            return Err(body);
        }
        let block: NonNull<Block<H, B>> = self.block.cast();
        // SAFETY: the block was allocated for a body of this type, as its kind says, and this is a
        // strong holder.
        let place = unsafe { &raw mut (*block.as_ptr()).body };
        // SAFETY: the body is not there, so nothing refers to it. Nothing else runs between here
        // and the exchange of the kind.
        unsafe { place.write(body) };
        counts.kind.set(Block::<H, B>::KIND);
        // SAFETY: as in `downcast_ref`.
        Ok(unsafe { &*ptr::from_ref(self).cast::<Counted<H, B>>() })
    }
}

impl<H> CountedHead<H> {
    #[inline]
    fn counts(&self) -> &Counts {
        // SAFETY: a strong holder keeps the block, and nothing has a unique reference to the
        // counts.
        unsafe { &(*self.block.as_ptr()).counts }
    }

    /// A weak holder of the same block.
    pub fn downgrade(&self) -> WeakHead<H> {
        let counts = self.counts();
        counts.weak.set(one_more(counts.weak.get()));
        WeakHead { block: self.block }
    }

    /// Drops the last strong holder.
    #[inline(never)]
    fn end(&mut self) {
        let kind = self.counts().kind.get();
        // The weak holder that represents all strong ones. Dropped after the contents, also if
        // their destructors panic.
        let _memory = WeakHead { block: self.block };
        // SAFETY: the kind is that of this block. No strong holder is left, and weak ones look at
        // the counts alone.
        unsafe { (kind.drop)(self.block.cast()) }
    }
}

/// # Panics
/// At four billion holders, of which most must have been leaked.
#[inline]
fn one_more(count: u32) -> u32 {
    match count.checked_add(1) {
        Some(count) => count,
        None => panic!("more holders of a connection than can be counted"),
    }
}

impl<H> Deref for CountedHead<H> {
    type Target = H;

    #[inline]
    fn deref(&self) -> &H {
        // SAFETY: a strong holder keeps the head alive, and nothing has a unique reference to it
        // before the last one went.
        unsafe { &(*self.block.as_ptr()).head }
    }
}

impl<H, B> Deref for Counted<H, B> {
    type Target = H;

    #[inline]
    fn deref(&self) -> &H {
        &self.head
    }
}

impl<H> Clone for CountedHead<H> {
    #[inline]
    fn clone(&self) -> CountedHead<H> {
        let counts = self.counts();
        counts.strong.set(one_more(counts.strong.get()));
        CountedHead { block: self.block }
    }
}

impl<H, B> Clone for Counted<H, B> {
    #[inline]
    fn clone(&self) -> Counted<H, B> {
        Counted { head: self.head.clone(), body: PhantomData }
    }
}

impl<H> Drop for CountedHead<H> {
    #[inline]
    fn drop(&mut self) {
        let counts = self.counts();
        let strong = counts.strong.get() - 1;
        counts.strong.set(strong);
        if strong == 0 {
            self.end();
        }
    }
}

/// Compares by identity.
impl<H> PartialEq for CountedHead<H> {
    fn eq(&self, other: &CountedHead<H>) -> bool {
        self.block == other.block
    }
}

impl<H, B> PartialEq for Counted<H, B> {
    fn eq(&self, other: &Counted<H, B>) -> bool {
        self.head == other.head
    }
}

impl<H> WeakHead<H> {
    fn counts(&self) -> &Counts {
        // SAFETY: a weak holder keeps the block, of which the counts are never dropped.
        unsafe { &(*self.block.as_ptr()).counts }
    }

    /// Returns a strong holder, as long as there is one.
    pub fn upgrade(&self) -> Option<CountedHead<H>> {
        let strong = &self.counts().strong;
        if strong.get() == 0 {
            return None;
        }
        strong.set(one_more(strong.get()));
        Some(CountedHead { block: self.block })
    }
}

impl<H> Clone for WeakHead<H> {
    fn clone(&self) -> WeakHead<H> {
        let weak = &self.counts().weak;
        weak.set(one_more(weak.get()));
        WeakHead { block: self.block }
    }
}

impl<H> Drop for WeakHead<H> {
    fn drop(&mut self) {
        let counts = self.counts();
        let weak = counts.weak.get() - 1;
        counts.weak.set(weak);
        if weak == 0 {
            let layout = counts.kind.get().layout;
            // SAFETY: no holder of any sort is left, the contents are dropped, and this is what the
            // block was allocated with.
            unsafe { dealloc(self.block.as_ptr().cast(), layout) }
        }
    }
}

/// Compares by identity.
impl<H> PartialEq for WeakHead<H> {
    fn eq(&self, other: &WeakHead<H>) -> bool {
        self.block == other.block
    }
}

impl<H: fmt::Debug> fmt::Debug for CountedHead<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<H: fmt::Debug, B> fmt::Debug for Counted<H, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<H> fmt::Debug for WeakHead<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(weak)")
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::rc::Rc;
    use std::string::String;

    use super::*;

    /// Counts its drops.
    struct DropCounter(Rc<Cell<u32>>);

    impl Drop for DropCounter {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn contents_are_dropped_once_with_the_last_strong_holder() {
        let drops = Rc::new(Cell::new(0));
        let one = Counted::try_new(DropCounter(drops.clone()), (DropCounter(drops.clone()), 7u8)).unwrap();
        let (two, weak) = (one.clone().hide(), one.head().downgrade());
        assert!(one.head() == &two && weak == two.downgrade());
        drop(one);
        assert_eq!(drops.get(), 0);
        let three = weak.upgrade().unwrap();
        drop(two);
        assert_eq!(three.downcast_ref::<(DropCounter, u8)>().unwrap().body().1, 7);
        drop(three);
        assert_eq!(drops.get(), 2);
        assert!(weak.upgrade().is_none() && weak.clone().upgrade().is_none());
    }

    #[test]
    fn a_body_is_found_by_its_type_alone() {
        #[repr(align(64))]
        struct Wide([u8; 64]);
        let text = Counted::try_new(1u16, String::from("text")).unwrap().hide();
        let wide = Counted::try_new(2u16, Wide([3; 64])).unwrap().hide();
        let none = Counted::try_new(4u16, ()).unwrap().hide();
        assert_eq!(text.downcast_ref::<String>().unwrap().body(), "text");
        assert!(text.downcast_ref::<Wide>().is_none() && wide.downcast_ref::<()>().is_none());
        // A body of the same size.
        assert!(text.downcast_ref::<[usize; 3]>().is_none() && wide.downcast_ref::<[Wide; 1]>().is_none());
        let wide = wide.downcast_ref::<Wide>().unwrap();
        assert_eq!((wide.body().0[63], ptr::from_ref(wide.body()).addr() % 64), (3, 0));
        assert_eq!((**wide, *none, none.downcast_ref::<()>().unwrap().body()), (2, 4, &()));
    }

    #[test]
    fn body_is_not_found_before_it_is_there() {
        let drops = Rc::new(Cell::new(0));
        let unfilled = Counted::<_, (DropCounter, u8)>::try_new_unfilled(DropCounter(drops.clone())).unwrap();
        let (other, weak) = (unfilled.clone(), unfilled.downgrade());
        assert!(
            unfilled.downcast_ref::<(DropCounter, u8)>().is_none() && unfilled.downcast_ref::<()>().is_none()
        );
        let wrong = unfilled.fill((7u8, DropCounter(drops.clone()))).err().unwrap();
        assert_eq!(wrong.0, 7, "of the same size, and another type");
        drop(wrong);
        assert_eq!(unfilled.fill((DropCounter(drops.clone()), 7u8)).ok().unwrap().body().1, 7);
        assert_eq!(other.downcast_ref::<(DropCounter, u8)>().unwrap().body().1, 7, "for every holder");
        assert!(unfilled.fill((DropCounter(drops.clone()), 8u8)).is_err(), "once");
        assert_eq!(drops.take(), 2, "the two that were refused");
        drop((unfilled, other));
        assert_eq!(drops.get(), 2);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn block_without_its_body_drops_its_head_alone() {
        let drops = Rc::new(Cell::new(0));
        let unfilled = Counted::<_, DropCounter>::try_new_unfilled(DropCounter(drops.clone())).unwrap();
        let weak = unfilled.downgrade();
        drop(unfilled);
        assert_eq!(drops.get(), 1);
        assert!(weak.upgrade().is_none());
        assert_eq!(weak.counts().weak.get(), 1, "the last holder frees the block");
    }

    #[test]
    fn contents_and_memory_are_freed_although_a_destructor_panics() {
        struct Panics(#[allow(dead_code)] DropCounter);
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("planted");
            }
        }
        fn check<H: 'static, B: 'static>(head: H, body: B, drops: &Cell<u32>) {
            let counted = Counted::try_new(head, body).unwrap();
            let weak = counted.head().downgrade();
            assert!(catch_unwind(AssertUnwindSafe(|| drop(counted))).is_err());
            assert_eq!(drops.take(), 2);
            assert!(weak.upgrade().is_none());
            assert_eq!(weak.counts().weak.get(), 1, "the last holder frees the block");
        }
        let drops = Rc::new(Cell::new(0));
        let noted = || DropCounter(drops.clone());
        check(noted(), Panics(noted()), &drops);
        check(Panics(noted()), noted(), &drops);
    }

    #[test]
    fn a_destructor_finds_its_weak_holders_empty() {
        struct Looks(Rc<Cell<Option<WeakHead<u8>>>>, Rc<Cell<u32>>);
        impl Drop for Looks {
            fn drop(&mut self) {
                let weak = self.0.take().unwrap();
                self.1.set(1 + u32::from(weak.upgrade().is_some()));
            }
        }
        let (slot, seen) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(0)));
        let counted = Counted::try_new(1u8, Looks(slot.clone(), seen.clone())).unwrap();
        slot.set(Some(counted.head().downgrade()));
        drop(counted);
        assert_eq!(seen.get(), 1);
    }

    #[test]
    fn a_holder_is_one_word_and_a_block_two_more_than_its_contents() {
        assert_eq!(size_of::<Option<Counted<u64, u64>>>(), size_of::<usize>());
        assert_eq!(size_of::<Block<u64, u64>>(), 4 * size_of::<usize>());
    }
}
