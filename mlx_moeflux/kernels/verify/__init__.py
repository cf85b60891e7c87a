"""Is what computes an operation right here, and which implementation is the fastest?

The order in which the files of this room come into play:

1. :mod:`~mlx_moeflux.kernels.verify.tune`, when a user asks: times the implementations of every
   operation and writes the table that :mod:`mlx_moeflux.kernels.dispatch` reads.
2. :mod:`~mlx_moeflux.kernels.verify.trials`, before a variant of an implementation first runs on
   Metal: asks whether it is right. :mod:`~mlx_moeflux.kernels.verify.comparison` compares it with
   stock MLX and with the truth on the arguments of the call, as
   :mod:`~mlx_moeflux.kernels.verify.arguments` cuts and draws them.
   :mod:`~mlx_moeflux.kernels.verify.choices` keeps whether stock MLX is faster, by what
   :mod:`~mlx_moeflux.kernels.verify.timing` times.
3. :mod:`~mlx_moeflux.kernels.verify.verdicts`: keeps the results of trials for later processes.
4. :mod:`~mlx_moeflux.kernels.verify.failures`, while a graph is evaluated: marks kernels that MLX
   cannot compile or launch, so that the next reply takes others.
5. :mod:`~mlx_moeflux.kernels.verify.check`, when a user asks: tries every implementation on small
   calls, and holds the operations of stock MLX, of which references are made, against float64
   (:mod:`~mlx_moeflux.kernels.verify.stock`).

Nothing here computes for a model; :mod:`mlx_moeflux.kernels.registry` asks.
"""
