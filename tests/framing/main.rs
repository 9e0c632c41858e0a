//! The way from bytes to frames, in whatever pieces they come.

mod frames;
mod framings;
mod segments;
mod tags;
