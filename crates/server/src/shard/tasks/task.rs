//! Tasks of a shard: the shard polls them, and their handles take the output.

use std::any::Any;
use std::borrow::Cow;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

/// A future that the shard polls.
pub(crate) trait Task {
    /// Polls the future, which must not be done.
    fn run(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()>;

    /// Moves the output of a future that is done into `output`, an `Option` of its type.
    fn take(self: Pin<&mut Self>, output: &mut dyn Any) {
        let _ = output;
    }

    /// The name that the spawner gave.
    fn name(&self) -> Option<&str> {
        None
    }
}

pub(crate) type Boxed = Pin<Box<dyn Task>>;

/// A task without a handle.
impl<F: Future<Output = ()>> Task for F {
    fn run(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        self.poll(task)
    }
}

/// A task whose output is for its handle. Without a name it takes no byte for one.
pub(crate) fn boxed<F: Future<Output: 'static> + 'static>(
    name: Option<Cow<'static, str>>,
    future: F,
) -> Boxed {
    let stage = Stage::Running { future };
    match name {
        None => Box::pin(Joined { stage, name: () }),
        Some(name) => Box::pin(Joined { stage, name }),
    }
}

/// The name of a task, if it has one.
trait Name {
    fn as_str(&self) -> Option<&str>;
}

impl Name for () {
    fn as_str(&self) -> Option<&str> {
        None
    }
}

impl Name for Cow<'static, str> {
    fn as_str(&self) -> Option<&str> {
        Some(self)
    }
}

pin_project! {
    struct Joined<F: Future, N> {
        #[pin]
        stage: Stage<F>,
        name: N,
    }
}

pin_project! {
    #[project = StageProjection]
    #[project_replace = StageReplaced]
    enum Stage<F: Future> {
        Running { #[pin] future: F },
        Done { output: F::Output },
        Over,
    }
}

impl<F: Future<Output: 'static>, N: Name> Task for Joined<F, N> {
    fn run(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let mut stage = self.project().stage;
        let StageProjection::Running { future } = stage.as_mut().project() else {
            return Poll::Ready(());
        };
        future.poll(task).map(|output| stage.set(Stage::Done { output }))
    }

    fn take(self: Pin<&mut Self>, output: &mut dyn Any) {
        if let StageReplaced::Done { output: done } = self.project().stage.project_replace(Stage::Over)
            && let Some(output) = output.downcast_mut()
        {
            *output = Some(done);
        }
    }

    fn name(&self) -> Option<&str> {
        self.name.as_str()
    }
}
