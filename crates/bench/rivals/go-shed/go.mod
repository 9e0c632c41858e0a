module ringserve/rivals/go-shed

go 1.23
